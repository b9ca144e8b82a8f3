"""Learns the time of a decode, a prompt token and a draft on these ranks from completed steps.

The model of a step's time, in milliseconds: decode(rows) + prompt_token * tokens of prompts + draft * drafts. decode is a mean
for each number of rows, because all rows share one pass over the weights; a step without decodes costs what the fewest rows do.
Every mean is exponential, so that it follows longer contexts and a busier machine. Only a replica learns: ranks that schedule
for themselves (torchrun) decide from tokens alone.
"""

import math
from dataclasses import dataclass
from typing import Final

from llama_core.scheduling.step import StepInput

_WEIGHT: Final = 1 / 8  # of the newest sample
# A sample is counted as at most this many times the mean, and a share of a decode step more: one disturbed step changes a mean
# little, and a mean of 0 can grow again.
_LARGEST_FACTOR: Final = 2.0
_LARGEST_SHARE: Final = 0.1
# Shares of a decode step, until they are measured: seven drafts make a step about a third longer.
_DRAFT_SHARE: Final = 1 / 20
_GAP_SHARE: Final = 1 / 2
# Of each decode step. Costs that once looked too high stop the drafts that would measure them, so they are forgotten slowly.
_DECAY: Final = 1 / 1000
_MIN_PROMPT_TOKENS: Final = 16  # fewer in a step say little about a prompt token's cost


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computes: rows of one known token each, tokens of prompts, and drafts."""

    num_decodes: int
    num_prompt_tokens: int
    num_drafts: int

    @classmethod
    def of(cls, batch: StepInput) -> "StepShape":
        num_decodes = num_prompt_tokens = num_drafts = 0
        for row in batch.rows:
            if row.length == 1 + row.num_drafts:
                num_decodes += 1
                num_drafts += row.num_drafts
            else:
                num_prompt_tokens += row.length
        return cls(num_decodes, num_prompt_tokens, num_drafts)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_prompt_tokens + self.num_drafts


@dataclass(frozen=True, slots=True)
class CostModel:
    """A step of any number of decodes takes base_ms + row_ms * decodes + token_ms * tokens of prompts; adapter_ms more where it
    loads an adapter. output_tokens: of a sequence, the mean. 0 for what is not known."""

    base_ms: float = 0.0
    row_ms: float = 0.0
    token_ms: float = 0.0
    adapter_ms: float = 0.0
    output_tokens: float = 0.0


class StepCosts:
    """Means over completed steps. Times in milliseconds; None before they are known."""

    def __init__(self) -> None:
        self.prompt_token_ms: float | None = None
        self._decode_ms: dict[int, float] = {}  # by the number of rows
        self._draft_ms: float | None = None
        self._gap_ms: float | None = None
        self._adapter_ms = 0.0

    def observe(self, shape: StepShape, elapsed_ms: float) -> None:
        """Learn from a completed step. elapsed_ms: from the time when rank 0 could begin it to its result."""
        if not 0 < elapsed_ms < math.inf:
            return
        decodes, prompts, drafts = shape.num_decodes, shape.num_prompt_tokens, shape.num_drafts
        base = self.decode_ms(decodes)
        if not prompts and not drafts:
            known = self._decode_ms.get(decodes, elapsed_ms)
            self._decode_ms[decodes] = _mean(known, elapsed_ms, known)
            self._forget(elapsed_ms)
        elif base is None:
            return
        elif not prompts:
            self._draft_ms = _mean(self.draft_ms(decodes) or 0.0, (elapsed_ms - base) / drafts, base)
        elif prompts >= _MIN_PROMPT_TOKENS:
            own = (elapsed_ms - base - drafts * (self.draft_ms(decodes) or 0.0)) / prompts
            known_ms = self.prompt_token_ms
            self.prompt_token_ms = max(0.0, own) if known_ms is None else _mean(known_ms, own, base)

    def observe_gap(self, gap_ms: float) -> None:
        """Learn how long ranks that have no further step wait from one step's end to the next one's begin."""
        decode = self.decode_ms(1)
        if decode is not None and math.isfinite(gap_ms):
            self._gap_ms = _mean(self.gap_ms or 0.0, gap_ms, decode)

    @property
    def gap_ms(self) -> float | None:
        if self._gap_ms is not None:
            return self._gap_ms
        decode = self.decode_ms(1)
        return None if decode is None else _GAP_SHARE * decode

    def decode_ms(self, num_rows: int) -> float | None:
        """The time of a step of `num_rows` decodes, or of the nearest number that was measured; 0 for none before that."""
        known = self._decode_ms
        if num_rows in known or not known:
            return known.get(num_rows, None if num_rows else 0.0)
        return known[min(known, key=lambda rows: abs(rows - num_rows))]

    def draft_ms(self, num_rows: int) -> float | None:
        """By how much a draft lengthens a step of `num_rows` decodes."""
        if self._draft_ms is not None:
            return self._draft_ms
        decode = self.decode_ms(num_rows)
        return None if decode is None else _DRAFT_SHARE * decode

    def step_ms(self, shape: StepShape) -> float | None:
        """The time that a step is expected to take; None while a part of it was never measured."""
        base = self.decode_ms(shape.num_decodes)
        draft = self.draft_ms(shape.num_decodes) if shape.num_drafts else 0.0
        prompt = self.prompt_token_ms if shape.num_prompt_tokens else 0.0
        if base is None or draft is None or prompt is None:
            return None
        return base + draft * shape.num_drafts + prompt * shape.num_prompt_tokens

    def observe_load(self, shape: StepShape, elapsed_ms: float) -> None:
        """Learn from a step that has loaded an adapter."""
        load_ms = max(0.0, elapsed_ms - (self.step_ms(shape) or 0.0))
        self._adapter_ms += (load_ms - self._adapter_ms) * (_WEIGHT if self._adapter_ms else 1.0)

    def model(self, output_tokens: float) -> CostModel:
        """A line through the decodes by the least squares. output_tokens: of a sequence, the mean."""
        known = self._decode_ms
        if not known:
            return CostModel(token_ms=self.prompt_token_ms or 0.0, output_tokens=output_tokens)
        mean_rows, mean_ms = sum(known) / len(known), sum(known.values()) / len(known)
        spread = sum((rows - mean_rows) ** 2 for rows in known)
        slope = sum((rows - mean_rows) * (ms - mean_ms) for rows, ms in known.items()) / spread if spread else 0.0
        row_ms = min(max(0.0, slope), mean_ms / mean_rows)  # the base is not negative
        base_ms = mean_ms - row_ms * mean_rows
        return CostModel(base_ms, row_ms, self.prompt_token_ms or 0.0, self._adapter_ms, output_tokens)

    def _forget(self, decode_ms: float) -> None:
        if self._draft_ms is not None:
            self._draft_ms += (_DRAFT_SHARE * decode_ms - self._draft_ms) * _DECAY
        if self._gap_ms is not None:
            self._gap_ms += (_GAP_SHARE * decode_ms - self._gap_ms) * _DECAY


def _mean(old: float, sample: float, decode_ms: float) -> float:
    """The exponential mean after one more sample, limited to 0 .. _LARGEST_FACTOR * old + _LARGEST_SHARE * decode_ms."""
    return old + (min(max(0.0, sample), _LARGEST_FACTOR * old + _LARGEST_SHARE * decode_ms) - old) * _WEIGHT
