"""Finds a rank that stays slow. All ranks take the same time for a step, because they wait for each other; the slow rank is the
one that does not wait.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cluster.wire.rank_status import RankStatus
from llama_core.model.share import SAMPLING_RANK

SLOWER_RATIO: Final = 2.0  # of a straggler's compute time to the median of the others', as a geometric mean of windows
MIN_EXCESS_MS: Final = 1.0  # a step, over that median
MIN_WINDOW_STEPS: Final = 20  # windows with fewer steps are ignored
SUSTAINED_WINDOWS: Final = 8  # windows of the mean; another busy process disturbs a rank for one window or two
_MAX_RATIO: Final = 3.0  # of one window, so that few windows of noise cannot make up a mean


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The steps between two readings of the ranks' statuses.

    compute_ms: milliseconds of a step, on average, that each rank computed without waiting for others, by rank; ranks whose
    time is unknown are absent. num_steps: the fewest steps of any rank in it. sample_ms: of these, the milliseconds in which
    rank 0 sampled.
    """

    compute_ms: Mapping[int, float] = field(default_factory=dict)
    num_steps: int = 0
    sample_ms: float | None = None


class StepTimes:
    """Turns the running totals in one group's statuses into windows."""

    def __init__(self) -> None:
        self._last: dict[int, RankStatus] = {}

    def next_window(self, statuses: Sequence[RankStatus | None]) -> StepWindow:
        """The steps since the last call. The first call has nothing to compare with."""
        compute_ms: dict[int, float] = {}
        counts: list[int] = []
        sample_ms: float | None = None
        for status in statuses:
            if status is None:
                continue
            last, self._last[status.rank] = self._last.get(status.rank), status
            if last is None or last.waited_s is None or status.waited_s is None or last.pid != status.pid:
                continue
            if (num_steps := status.num_steps - last.num_steps) > 0:
                seconds = (status.step_s - last.step_s) - (status.waited_s - last.waited_s)
                compute_ms[status.rank] = 1e3 * max(0.0, seconds) / num_steps
                counts.append(num_steps)
                if status.rank == SAMPLING_RANK and status.sampled_s is not None and last.sampled_s is not None:
                    sample_ms = 1e3 * (status.sampled_s - last.sampled_s) / num_steps
        return StepWindow(compute_ms, min(counts, default=0), sample_ms)


class _Evidence(NamedTuple):
    """One rank in one window: the logarithm of its ratio to the others, and its excess in milliseconds a step."""

    log_ratio: float
    excess_ms: float


class StragglerDetector:
    """Reports a rank that was slow over the last `SUSTAINED_WINDOWS` windows, and again only after it has recovered."""

    def __init__(self) -> None:
        self._evidence: dict[int, deque[_Evidence]] = {}
        self._reported: set[int] = set()

    def update(self, window: StepWindow) -> int | None:
        """The rank that is a straggler by this window, if there is one."""
        if window.num_steps < MIN_WINDOW_STEPS or len(window.compute_ms) < 2:
            return None
        found: int | None = None
        for rank, own_ms in window.compute_ms.items():
            others_ms = statistics.median(ms for other, ms in window.compute_ms.items() if other != rank)
            ratio = min(max(own_ms / others_ms, 1 / _MAX_RATIO), _MAX_RATIO) if others_ms > 0 else _MAX_RATIO
            recent = self._evidence.setdefault(rank, deque(maxlen=SUSTAINED_WINDOWS))
            recent.append(_Evidence(math.log(ratio), own_ms - others_ms))
            mean_ratio = math.exp(sum(evidence.log_ratio for evidence in recent) / SUSTAINED_WINDOWS)
            excess_ms = statistics.median(evidence.excess_ms for evidence in recent)
            if mean_ratio < math.sqrt(SLOWER_RATIO):
                self._reported.discard(rank)
            elif mean_ratio >= SLOWER_RATIO and excess_ms >= MIN_EXCESS_MS and rank not in self._reported:
                self._reported.add(rank)
                found = rank
        return found
