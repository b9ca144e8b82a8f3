"""Estimates when a client that finds the queue full should try again. Pure: knows only when requests ended."""

import time
from collections import deque
from typing import Final

SHORTEST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 120.0
# The throughput of requests is measured in the shortest of these windows that has enough ends of requests.
WINDOWS_S: Final = (5.0, 30.0, LONGEST_RETRY_S)
MIN_ENDS: Final = 4


class RetryEstimate:
    """Call `request_ended` for each request; `seconds` is for the Retry-After of a refusal."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=64)  # of the latest requests, in time.monotonic()

    def request_ended(self, when_s: float) -> None:
        self._ends.append(when_s)

    def seconds(self, num_waiting: int) -> float:
        """Seconds until half of the waiting requests have ended at the latest throughput."""
        now = time.monotonic()
        latest: list[float] = []
        # The shortest window with enough ends counts: a burst is faster than the quiet hours before it.
        for window_s in WINDOWS_S:
            if len(latest := [end for end in self._ends if now - end <= window_s]) >= MIN_ENDS:
                break
        if len(latest) < 2:
            return SHORTEST_RETRY_S
        ends_per_s = len(latest) / max(now - latest[0], 1e-3)
        return min(max(SHORTEST_RETRY_S, num_waiting / 2 / ends_per_s), LONGEST_RETRY_S)
