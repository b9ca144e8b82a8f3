"""The report of each completed step for metrics: what the scheduler has counted since the last one."""

from collections.abc import Sequence as Seq
from operator import sub
from typing import NamedTuple

from deployments.engine.step_pacing import SentStep
from llama_core.errors import NonFiniteLogits
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.step import StepOutput

Intervals = Seq[tuple[float, int]]


class StepStats(NamedTuple):
    """One completed step, for metrics. elapsed_ms: of rank 0, in milliseconds.

    num_sampled: tokens that the step gave to requests. is_decode: the step gave tokens or ended requests, and read no prompt.
    num_drafts, num_drafts_accepted: draft tokens verified and accepted. num_prompt_tokens, num_prompt_hits: prompt tokens of
    newly admitted sequences, and those of them found in the prefix cache. All since the last step's report. num_deferred:
    samples that slow grammars left to a later step. num_computed: tokens of prompts that the step computed.
    token_intervals: pairs of a time between tokens, in seconds, and how many of the step's tokens had it.
    """

    num_rows: int
    num_tokens: int
    num_sampled: int
    elapsed_ms: float
    is_decode: bool
    num_non_finite: int = 0
    device_memory_bytes: int = 0
    num_drafts: int = 0
    num_drafts_accepted: int = 0
    num_prompt_tokens: int = 0
    num_prompt_hits: int = 0
    num_deferred: int = 0
    token_intervals: Intervals = ()
    num_computed: int = 0


class StepReports:
    """Counts between two reports."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_prompt_tokens = self._num_prompt_hits = 0  # of sequences admitted since the last report
        self._counts = (0, 0, 0)  # the scheduler's totals at the last report

    def admitted(self, seq: Sequence) -> None:
        """A sequence runs for the first time."""
        self._num_prompt_tokens += seq.prompt_len
        self._num_prompt_hits += seq.num_cached or 0

    def of(
        self, step: SentStep, output: StepOutput, gained: dict[Sequence, list[int]], intervals: Intervals
    ) -> StepStats:
        """gained: the step's tokens by sequence."""
        scheduler, shape = self._scheduler, step.shape
        canary = scheduler.quarantine.canary
        num_drafts, num_accepted = scheduler.speculation.num_drafts, scheduler.speculation.num_accepted
        counts = (num_drafts, num_accepted, scheduler.num_deferred)
        drafts, accepted, deferred = map(sub, counts, self._counts)
        self._counts = counts
        stats = StepStats(
            num_rows=len(step.batch.rows),
            num_tokens=shape.num_tokens,
            num_sampled=sum(map(len, gained.values())) - (len(gained.get(canary, ())) if canary is not None else 0),
            elapsed_ms=output.elapsed_ms,
            num_non_finite=sum(isinstance(seq.error, NonFiniteLogits) for seq in gained) if output.non_finite else 0,
            device_memory_bytes=output.device_memory_bytes,
            is_decode=bool(gained) and not shape.num_prompt_tokens,
            num_drafts=drafts,
            num_drafts_accepted=accepted,
            num_prompt_tokens=self._num_prompt_tokens,
            num_prompt_hits=self._num_prompt_hits,
            num_deferred=deferred,
            token_intervals=intervals,
            num_computed=shape.num_prompt_tokens,
        )
        self._num_prompt_tokens = self._num_prompt_hits = 0
        return stats
