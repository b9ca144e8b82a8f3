"""Finds a rank that is slow for long. All ranks take the same time for a step, because they wait for each other: the slow one
is the one that does not wait.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from cluster.wire.rank_status import RankStatus

SLOWER_RATIO: Final = 2.0  # of a straggler's compute time to the median of the others'
MIN_EXCESS_MS: Final = 1.0  # a step, over that median
MIN_WINDOW_STEPS: Final = 20  # windows with fewer steps tell nothing
SUSTAINED_WINDOWS: Final = 4  # in a row; a busy neighbour disturbs a rank for one window or two


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The steps between two readings of the ranks' statuses.

    compute_ms: milliseconds of a step, on average, that each rank computed without waiting for others, by rank; ranks whose
    time is unknown are absent. num_steps: the fewest steps of any rank in it.
    """

    compute_ms: Mapping[int, float] = field(default_factory=dict)
    num_steps: int = 0


class StepTimes:
    """Turns the running totals in one group's statuses into windows."""

    def __init__(self) -> None:
        self._last: dict[int, RankStatus] = {}

    def next_window(self, statuses: Sequence[RankStatus | None]) -> StepWindow:
        """The steps since the last call. The first call has nothing to compare with."""
        compute_ms: dict[int, float] = {}
        counts: list[int] = []
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
        return StepWindow(compute_ms, min(counts, default=0))


class StragglerDetector:
    """Reports a rank once it has been slow in `SUSTAINED_WINDOWS` windows in a row, and again only after it has recovered."""

    def __init__(self) -> None:
        self._candidate: int | None = None
        self._num_windows = 0  # in a row with this candidate

    def update(self, window: StepWindow) -> int | None:
        """The rank that this window proves to be a straggler, if it proves one."""
        if window.num_steps < MIN_WINDOW_STEPS:
            return None
        slow = slowest(window.compute_ms)
        self._num_windows = self._num_windows + 1 if slow == self._candidate else 1
        self._candidate = slow
        return slow if slow is not None and self._num_windows == SUSTAINED_WINDOWS else None


def slowest(compute_ms: Mapping[int, float]) -> int | None:
    """The rank that takes far longer than the others in one window, if one does."""
    if len(compute_ms) < 2:
        return None
    slow = max(compute_ms, key=lambda rank: compute_ms[rank])
    others = statistics.median(ms for rank, ms in compute_ms.items() if rank != slow)
    is_slow = compute_ms[slow] > SLOWER_RATIO * others and compute_ms[slow] - others > MIN_EXCESS_MS
    return slow if is_slow else None
