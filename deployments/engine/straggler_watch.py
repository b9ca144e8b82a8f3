"""Reads the ranks' statuses every few seconds: their compute times for metrics, and a warning about a sustained straggler."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from cluster.driver.stragglers import StepTimes, StepWindow, StragglerDetector
from cluster.wire.rank_status import RankStatus

log = logging.getLogger(__name__)

WINDOW_S: Final = 5.0


async def watch_stragglers(
    read_statuses: Callable[[], Awaitable[Sequence[RankStatus | None]]], on_window: Callable[[StepWindow], None]
) -> None:
    """Runs until cancelled. `on_window` gets each window."""
    times, detector = StepTimes(), StragglerDetector()
    while True:
        try:
            window = times.next_window(await read_statuses())
        except Exception as error:  # the metrics miss one reading; the group reports its own failures
            log.warning("the ranks' step times are unknown: %s", type(error).__name__)
            window = StepWindow()
        on_window(window)
        if (straggler := detector.update(window)) is not None:
            times_ms = ", ".join(f"rank {rank} {ms:.2f} ms" for rank, ms in sorted(window.compute_ms.items()))
            log.warning("rank %d is slow, and every step waits for it; compute time a step: %s", straggler, times_ms)
        await asyncio.sleep(WINDOW_S)
