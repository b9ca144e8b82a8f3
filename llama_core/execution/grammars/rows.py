"""A step's rows with grammars, and their masks, which threads fill (`masks.py`)."""

from collections.abc import Sequence as Seq
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import numpy as np

from llama_core.execution.grammars.follower import (
    AnswerFollower,
    CompiledGrammar,
    GrammarRefused,
    GrammarUnavailable,
    RowMasks,
)
from llama_core.scheduling.step import ForcedTokens


@dataclass(slots=True, eq=False)
class GrammarSlot:
    """A slot whose sequence has a grammar. Only the thread of the masks reads and writes `tokens` and what follows `drafts`;
    `deferred_at` with the lock of `SlotGrammars`."""

    key: int
    scope: str  # `SlotInit.cache_scope`
    grammar: str
    first: int  # the position of the answer's first token
    limit: int | None  # the position behind the last token that may be sampled; None: the end is not brought about
    tokens: list[int]  # of the answer, as far as the thread has read the steps' samples
    drafts: list[int] = field(default_factory=list)  # of the step that begins
    follower: AnswerFollower | None = None  # None before the first row, and in the process for slow grammars
    is_slow: bool = False
    compiled: CompiledGrammar | None = None
    compiling: "Future[CompiledGrammar] | None" = None
    following: "Future[RowMasks] | None" = None  # masks from the process for slow grammars, or found here too late
    deferred_at: int | None = None  # the position of the first sample that was deferred
    is_ended: bool = False  # its answer has ended or was preempted

    @property
    def may_be_late(self) -> bool:
        """Whether its next mask may take longer than the usual time: the first one of an answer, and where one has lately."""
        return self.compiled is None or not self.compiled.is_quick or self.deferred_at is not None

    def is_pending(self, longest_s: float | None) -> bool:
        """Whether the row's grammar or masks are still missing after a wait of at most `longest_s`; None: wait without
        limit."""
        if self.compiling is not None:
            return not wait([self.compiling], longest_s).done
        return self.following is not None and not wait([self.following], longest_s).done


@dataclass(slots=True)
class GrammarRow:
    """One row: its samples are sample .. end of the step, its first sampled position is `position`. drafts: proposed for
    `position` and after."""

    row: int
    sample: int
    end: int
    position: int
    slot: GrammarSlot
    drafts: list[int]

    @property
    def is_void(self) -> bool:
        """Whether the row's samples cannot count: an earlier sample of the slot was deferred, or the answer has ended."""
        if self.slot.is_ended:
            return True
        return self.slot.deferred_at is not None and self.position != self.slot.deferred_at

    def note(self, sampled: Seq[int]) -> None:
        """Append the step's samples to the slot's tokens. The next row's samples replace those behind a refused draft."""
        del self.slot.tokens[self.position - self.slot.first :]
        self.slot.tokens += sampled[self.sample : self.end]


@dataclass(slots=True)
class GrammarMasks:
    """The masks of one step. Implements `execution.backend.StepMasks`.

    After `wait`: reasons: why a sample has no token, by its index. unavailable: such samples for which the server is at fault.
    forced: tokens that grammars leave no choice but to generate. shortened: samples that lost a token so that the answer ends
    in time (`json_ending`). deferred: samples that are left to a later step.

    is_watched: the watching thread may close the masks. closed: done once nothing changes any more; with the error of the step
    before, if that failed.
    """

    bits: np.ndarray
    has_mask: list[bool]
    is_ready: np.ndarray
    jobs: Seq[GrammarRow] = ()
    is_watched: bool = False
    reasons: dict[int, str] = field(default_factory=dict)
    unavailable: list[int] = field(default_factory=list)
    forced: list[ForcedTokens] = field(default_factory=list)
    shortened: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    closed: "Future[None]" = field(default_factory=Future)

    @property
    def is_done(self) -> bool:
        return self.closed.done()

    def wait(self) -> None:
        self.closed.result()

    def close(self, failure: Exception | None = None) -> None:
        if failure is None:
            self.closed.set_result(None)
        else:
            self.closed.set_exception(failure)

    def note(self, sampled: Seq[int]) -> None:
        """Pass the tokens of the step's samples on to its rows, except deferred rows, whose tokens are placeholders."""
        for job in self.jobs:
            if job.sample not in self.deferred:
                job.note(sampled)

    def has(self, job: GrammarRow, found: RowMasks) -> None:
        """Store the row's masks, and mark its samples as ready."""
        if self.is_watched or found.bits.base is not self.bits:
            self.bits[job.sample : job.end] = found.bits
        if found.reasons:
            self.reasons |= {job.sample + i: reason for i, reason in found.reasons.items()}
        if found.shortened:
            self.shortened += [job.sample + i for i in found.shortened]
        if found.forced:
            self.forced.append(ForcedTokens(job.row, job.position, found.forced))
        self.is_ready[job.sample : job.end] = 1  # the bits were written before

    def allow_nothing(self, job: GrammarRow, refused: GrammarRefused | None) -> None:
        """Mark the row's samples as ready without a token. refused: None defers the samples to a later step."""
        self.bits[job.sample : job.end] = 0
        samples = range(job.sample, job.end)
        if refused is None:
            self.deferred += samples
        else:
            self.reasons |= dict.fromkeys(samples, str(refused))
            if isinstance(refused, GrammarUnavailable):
                self.unavailable += samples
        self.is_ready[job.sample : job.end] = 1
