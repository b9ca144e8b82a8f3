"""Learns the time of a decode, a prompt token and a draft on these ranks from completed steps.

The model of a step's time, in milliseconds: decode(rows) + prompt_token * tokens of prompts + draft * drafts, where decode is a
mean for each number of rows, because weights are read once for all rows. Every mean is exponential, so that it follows longer
contexts and a busier machine. Only a replica learns: ranks that schedule for themselves (torchrun) decide from tokens alone.
"""

from dataclasses import dataclass
from typing import Final

from llama_core.scheduling.step import StepInput

_WEIGHT: Final = 1 / 8  # of the newest step
_LARGEST_FACTOR: Final = 2.0  # a step that took longer than this times its mean was disturbed, and counts as this long
_DRAFT_SHARE: Final = 1 / 20  # of a decode step, until drafts were measured: seven make a step about a third longer
_DRAFT_DECAY: Final = 1 / 1000  # of each decode step: a cost that once looked too high is measured again
_MIN_PROMPT_TOKENS: Final = 16  # steps with fewer are too noisy


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


class StepCosts:
    """Times in milliseconds. `prompt_token_ms`, `gap_ms`: None until measured."""

    def __init__(self) -> None:
        self.prompt_token_ms: float | None = None
        self.gap_ms: float | None = None
        self._decode_ms: dict[int, float] = {}  # by the number of rows
        self._draft_ms: float | None = None

    def observe(self, shape: StepShape, elapsed_ms: float) -> None:
        """Learn from a completed step. elapsed_ms: its time on the ranks, without any wait for it."""
        if elapsed_ms <= 0:
            return
        decodes, prompts, drafts = shape.num_decodes, shape.num_prompt_tokens, shape.num_drafts
        base = self.decode_ms(decodes) if decodes else 0.0
        if not prompts and not drafts:
            self._decode_ms[decodes] = _mean(self._decode_ms.get(decodes), elapsed_ms)
            if self._draft_ms is not None:
                self._draft_ms += (_DRAFT_SHARE * elapsed_ms - self._draft_ms) * _DRAFT_DECAY
        elif base is None:
            return
        elif not prompts:
            self._draft_ms = _mean(self.draft_ms(decodes), max(0.0, elapsed_ms - base) / drafts)
        elif prompts >= _MIN_PROMPT_TOKENS:
            own = elapsed_ms - base - drafts * (self.draft_ms(decodes) or 0.0)
            self.prompt_token_ms = _mean(self.prompt_token_ms, max(0.0, own) / prompts)

    def observe_gap(self, gap_ms: float) -> None:
        """Learn the time between two steps on ranks that had no further step in flight."""
        self.gap_ms = _mean(self.gap_ms, max(0.0, gap_ms))

    def decode_ms(self, num_rows: int) -> float | None:
        """The time of a step of `num_rows` decodes, or of the nearest number that was measured; None before any was."""
        known = self._decode_ms.get(num_rows)
        if known is not None or not self._decode_ms:
            return known
        return self._decode_ms[min(self._decode_ms, key=lambda rows: abs(rows - num_rows))]

    def draft_ms(self, num_rows: int) -> float | None:
        """The time that a draft adds to a step of `num_rows` decodes; None before any decode was measured."""
        if self._draft_ms is not None:
            return self._draft_ms
        decode = self.decode_ms(num_rows)
        return None if decode is None else _DRAFT_SHARE * decode

    def step_ms(self, shape: StepShape) -> float | None:
        """The expected time of a step; None while a part of it was never measured."""
        decode = self.decode_ms(shape.num_decodes) if shape.num_decodes else 0.0
        draft = self.draft_ms(shape.num_decodes) if shape.num_drafts else 0.0
        prompt = self.prompt_token_ms if shape.num_prompt_tokens else 0.0
        if decode is None or draft is None or prompt is None:
            return None
        return decode + draft * shape.num_drafts + prompt * shape.num_prompt_tokens


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + (min(new, _LARGEST_FACTOR * old) - old) * _WEIGHT
