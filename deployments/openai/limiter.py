"""Bounds the number of threads with expensive work, and the amount of work that may wait for one."""

import asyncio
from collections.abc import Callable, Hashable
from typing import TypeVar
from weakref import WeakValueDictionary

from llama_core.errors import QueueFull

Result = TypeVar("Result")


class ConcurrencyLimiter:
    """`await limiter.run(work, weight)`: at most `at_once` threads run; other work waits in the order of its arrival. Of work
    with a key, each key's next piece alone is in that order, so that keys take turns.

    A weight is the memory that a piece of work holds, in any unit. All work together, running and waiting, weighs at most
    `max_weight`; a single piece alone may weigh more.
    """

    def __init__(self, at_once: int, max_weight: int, work: str = "long texts are being tokenized") -> None:
        """work: words for a refusal, after "Too many"."""
        self._slots = asyncio.Semaphore(at_once)
        self._max_weight = max_weight
        self._work = work
        self._turns = WeakValueDictionary[Hashable, asyncio.Lock]()
        self.weight = 0

    async def run(self, work: Callable[[], Result], weight: int = 1, key: Hashable = None) -> Result:
        """The result of `work`. Raises QueueFull at once when too much work runs and waits already.

        A thread cannot be cancelled: the work of a cancelled caller counts until its thread has ended.
        """
        if self.weight and self.weight + weight > self._max_weight:
            raise QueueFull(f"Too many {self._work} at once.")
        self.weight += weight
        turn = asyncio.Lock() if key is None else self._turns.setdefault(key, asyncio.Lock())
        try:
            async with turn:
                await self._slots.acquire()
        except BaseException:
            self.weight -= weight
            raise

        def ended(_: asyncio.Future[Result]) -> None:
            self._slots.release()
            self.weight -= weight

        thread = asyncio.get_running_loop().run_in_executor(None, work)
        thread.add_done_callback(ended)
        try:
            return await asyncio.shield(thread)
        finally:
            del thread  # whose error holds this frame, and so the work
