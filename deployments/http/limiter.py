"""A few at a time do what takes long; a few more wait for it, and whoever comes then is told to come again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from llama_core.errors import QueueFull


class Turns:
    """`async with turns.one():` at most `at_once` blocks run, and at most `most_waiting` wait. Bounds what they hold, too."""

    def __init__(self, at_once: int, most_waiting: int) -> None:
        self._most = at_once + most_waiting
        self._free = asyncio.Semaphore(at_once)
        self._num_here = 0

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Raises QueueFull where too many wait."""
        if self._num_here >= self._most:
            raise QueueFull("Too many long texts are in work at once.")
        self._num_here += 1
        try:
            async with self._free:
                yield
        finally:
            self._num_here -= 1
