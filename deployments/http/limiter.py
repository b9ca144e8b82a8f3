"""Bounds how many pieces of expensive work run at once, and how much work may wait for its turn."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from llama_core.errors import QueueFull


class ConcurrencyLimiter:
    """`async with limiter.slot(weight):` at most `at_once` blocks run; the others wait in the order of their arrival.

    A weight says how much memory a block holds, in any unit. All blocks together, running and waiting, weigh at most
    `max_weight`; a block that is alone may weigh more.
    """

    def __init__(self, at_once: int, max_weight: int) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._max_weight = max_weight
        self.weight = 0

    @contextlib.asynccontextmanager
    async def slot(self, weight: int = 1) -> AsyncIterator[None]:
        """Raises QueueFull at once when too much work runs and waits already."""
        if self.weight and self.weight + weight > self._max_weight:
            raise QueueFull("Too many long texts are in work at once.")
        self.weight += weight
        try:
            async with self._slots:
                yield
        finally:
            self.weight -= weight
