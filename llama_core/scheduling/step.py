"""The messages of a step between the driver and the ranks: plain data, small, the same for one rank and for eight.

Ranks keep the state of each slot (tokens, block table, sampling parameters), so a step carries only what changed. A sampled
token stays on the ranks as the next step's input; the driver may therefore send step n + 1 before it has read the output of n.
Knows nothing of how the messages are sent (`cluster/wire/messages.py`) or of the decisions in them (`scheduler.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from llama_core.scheduling.request import Sequence, TokenLogprob
from llama_core.scheduling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SlotInit:
    """A sequence is admitted to a slot: its whole state on a rank.

    tokens: the prompt and the tokens generated before (after a preemption or a restart).
    blocks: the cache blocks of positions 0 .. len(blocks) * block_size.
    prompt_logprobs: report those of `tokens`; False also where an earlier admission reported all of them.
    prompt_length: the first so many of `tokens` are the prompt; None for all.
    delayed: tokens that are not sampled before `params.min_tokens` tokens were generated.
    cache_scope: shares a compiled grammar with other sequences of this scope; "" without a grammar.
    adapter_place: of its LoRA adapter on the ranks; 0 for none.
    """

    slot: int
    tokens: list[int]
    blocks: list[int]
    params: SamplingParams
    prompt_logprobs: bool = False
    prompt_length: int | None = None
    delayed: tuple[int, ...] = ()
    cache_scope: str = ""
    adapter_place: int = 0

    @classmethod
    def of(cls, seq: Sequence, stop_ids: frozenset[int], adapter_place: int = 0) -> "SlotInit":
        """Of an admitted sequence. stop_ids: the model's."""
        assert seq.slot is not None
        params = seq.params
        ends = params.min_tokens or params.allowed_token_ids
        return cls(
            slot=seq.slot,
            tokens=list(seq.tokens),
            blocks=list(seq.blocks),
            params=params,
            prompt_logprobs=seq.wants_prompt_logprobs,
            prompt_length=seq.prompt_len,
            delayed=tuple(sorted(stop_ids.union(params.stop_token_ids))) if ends else (),
            cache_scope=seq.terms.cache_scope if params.grammar else "",
            adapter_place=adapter_place,
        )


class Row(NamedTuple):
    """Compute tokens start .. start + length of a slot; if `samples`, sample the token at position start + length.

    A row is one sequence's part of a step. Prefill is a row with many new tokens, decode a row with one. A row with
    num_drafts = k > 0 samples and has length 1 + k: one known token and k proposed ones (`StepInput.drafts`). A token is
    sampled at each of the 1 + k positions start + 1 .. start + 1 + length, each after the tokens before it.
    """

    slot: int
    start: int
    length: int
    samples: bool
    num_drafts: int = 0


class AdapterLoad(NamedTuple):
    """Hold the LoRA adapter of this digest, whose files lie in `folder`, at `place`, in place of the one there."""

    place: int
    digest: str
    folder: str


class Grow(NamedTuple):
    """Append `block` to the slot's block table."""

    slot: int
    block: int


class Draft(NamedTuple):
    """Tokens proposed for positions start .. start + len(tokens) of a slot, whose row in this step begins at start - 1.

    The sample at each of these positions replaces the draft there, so that a draft lives for one step. Samples after one that
    differs from its draft were made after a wrong prefix: a later row begins before them and computes them again.
    """

    slot: int
    start: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step, the same for every rank. Applied in order: adapters, admit, grow, drafts, rows.

    No message says that a sequence has left: a slot that is admitted again is overwritten. Rows of one step may share blocks:
    a row may attend to keys and values that another row of the same step writes, so in every layer all are written before any
    is read.
    """

    epoch: int
    step: int
    rows: list[Row]
    admit: list[SlotInit] = field(default_factory=list)
    grow: list[Grow] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    adapters: list[AdapterLoad] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.length for row in self.rows)

    @property
    def num_samples(self) -> int:
        """Number of tokens in this step's output."""
        return sum(row.samples + row.num_drafts for row in self.rows)


class PromptLogprobs(NamedTuple):
    """Logprobs of the known tokens at positions start + 1 .. start + 1 + len(values) of rows[row]'s slot."""

    row: int
    start: int
    values: list[TokenLogprob]


class Embedding(NamedTuple):
    """Of the prompt that rows[row] has completed: float32 [dim], little-endian; b"" where it is not finite."""

    row: int
    values: bytes


class ForcedTokens(NamedTuple):
    """Tokens that the grammar of rows[row] expects at positions start, start + 1, ..., unless it can be written otherwise."""

    row: int
    start: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The sampled tokens: 1 + num_drafts for each sampling row, in the order of their positions and of `StepInput.rows`.

    logprobs is empty when no row asked for them, else one entry for each sample (None where its row did not ask). non_finite
    lists each i for which the logits of tokens[i] held NaN or infinity: that token is undefined, as is that of each i in
    refused: no token was allowed there, for the reason that the pair gives. forced: the tokens that rows' grammars leave no
    choice but to generate, where rank 0 has found some. deferred: each i whose mask of a grammar was not ready in time, so
    that tokens[i] is undefined and a later step has to sample it. mask_wait_ms: of elapsed_ms, the time that sampling waited
    for masks; None where the backend does not measure it.
    """

    epoch: int
    step: int
    tokens: list[int]
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    non_finite: list[int] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    forced: list[ForcedTokens] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    elapsed_ms: float = 0.0
    mask_wait_ms: float | None = None
    device_memory_bytes: int = 0
    embeddings: list[Embedding] = field(default_factory=list)


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Pending(Generic[Result]):
    """A computation that was started and may still run, on a GPU. Results are read once, in the order of the starts.

    `result` waits until it is ready; `is_ready` tells without waiting. `is_done`: the computation was complete when `start`
    returned, which, unlike `is_ready`, is the same on all ranks.
    """

    result: Callable[[], Result]
    is_ready: Callable[[], bool]
    is_done: bool = False

    @staticmethod
    def done(value: Result) -> "Pending[Result]":
        return Pending(lambda: value, lambda: True, is_done=True)
