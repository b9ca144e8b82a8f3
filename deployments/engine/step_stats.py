"""The report of a completed step for metrics."""

from collections.abc import Sequence
from typing import NamedTuple

Intervals = Sequence[tuple[float, int]]


class StepStats(NamedTuple):
    """One completed step, for metrics. elapsed_ms: of rank 0, in milliseconds.

    num_sampled: tokens that the step gave to requests. is_decode: the step gave tokens or ended requests, and read no prompt.
    num_drafts, num_drafts_accepted: draft tokens verified and
    accepted. num_prompt_tokens, num_prompt_hits: prompt tokens of newly admitted sequences, and those of them found in the
    prefix cache. All since the last step's report. num_deferred: samples that slow grammars left to a later step.
    token_intervals: pairs of a time between tokens, in seconds, and how many of the step's tokens had it.
    """

    num_rows: int
    num_tokens: int
    num_sampled: int
    elapsed_ms: float
    num_non_finite: int
    device_memory_bytes: int
    is_decode: bool
    num_drafts: int = 0
    num_drafts_accepted: int = 0
    num_prompt_tokens: int = 0
    num_prompt_hits: int = 0
    num_deferred: int = 0
    token_intervals: Intervals = ()
