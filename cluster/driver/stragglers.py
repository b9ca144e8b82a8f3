"""How long each rank takes for its own part of a step. All take the same time from start to end, for they wait for each other:
the slow one is the one that does not wait.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from cluster.rank.rank_worker import RankStatus

TIMES_SLOWER: Final = 2.0  # than the others' median
WORTH_MENTIONING_MS: Final = 0.5


class Pace:
    """Of one group's ranks, from one look at their statuses to the next."""

    def __init__(self) -> None:
        self._last: dict[int, RankStatus] = {}

    def look(self, statuses: Sequence[RankStatus | None]) -> dict[int, float]:
        """Milliseconds of a step that each rank computed by itself, on average since the last look, by rank. Without those of
        which it is not known.
        """
        own: dict[int, float] = {}
        for status in statuses:
            if status is None:
                continue
            last, self._last[status.rank] = self._last.get(status.rank), status
            if last is None or last.waited_s is None or status.waited_s is None or last.pid != status.pid:
                continue
            if (num_steps := status.num_steps - last.num_steps) > 0:
                seconds = (status.step_s - last.step_s) - (status.waited_s - last.waited_s)
                own[status.rank] = 1e3 * max(0.0, seconds) / num_steps
        return own


def straggler(own_ms: Mapping[int, float]) -> int | None:
    """The rank that takes far longer than the others, if one does."""
    if len(own_ms) < 2:
        return None
    slowest = max(own_ms, key=lambda rank: own_ms[rank])
    others = statistics.median(ms for rank, ms in own_ms.items() if rank != slowest)
    is_slow = own_ms[slowest] > TIMES_SLOWER * others and own_ms[slowest] - others > WORTH_MENTIONING_MS
    return slowest if is_slow else None
