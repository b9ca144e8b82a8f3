"""The report of a completed step for metrics."""

from typing import NamedTuple


class StepStats(NamedTuple):
    """One completed step, for metrics. Times are in milliseconds; `round_trip_ms` runs from sending the step to its output.

    num_sampled: tokens that the step gave to requests. num_prefix_hits: prompt tokens found in the prefix cache.
    num_drafts, num_drafts_accepted: draft tokens verified and accepted. All since the last step's report.
    """

    num_rows: int
    num_tokens: int
    num_sampled: int
    elapsed_ms: float
    round_trip_ms: float
    num_non_finite: int
    device_memory_bytes: int
    decode_only: bool
    num_prefix_hits: int = 0
    num_drafts: int = 0
    num_drafts_accepted: int = 0
