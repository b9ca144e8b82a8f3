"""Bounds the number of threads with expensive work, and the amount of work that may wait for one."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from llama_core.errors import NotReady, QueueFull

Result = TypeVar("Result")

# A key of `TurnLimiter` may weigh this many times what is left: four fifths of all if no other key has work.
_TIMES_LEFT: Final = 4


class ConcurrencyLimiter:
    """`await limiter.run(work, weight)`: at most `at_once` threads run; other work waits in the order of its arrival.

    A weight is the memory that a piece of work holds, in any unit. All work together, running and waiting, weighs at most
    `max_weight`; a single piece alone may weigh more.
    """

    def __init__(self, at_once: int, max_weight: int, work: str = "long texts are being tokenized") -> None:
        """work: words for a refusal, behind "Too many"."""
        self._slots = asyncio.Semaphore(at_once)
        self._max_weight = max_weight
        self._work = work
        self.weight = 0

    async def run(self, work: Callable[[], Result], weight: int = 1) -> Result:
        """The result of `work`. Raises QueueFull at once when too much work runs and waits already.

        A thread cannot be cancelled: the work of a cancelled caller counts until its thread has ended.
        """
        if self.weight and self.weight + weight > self._max_weight:
            raise QueueFull(f"Too many {self._work} at once.")
        self.weight += weight
        try:
            await self._slots.acquire()
        except BaseException:
            self.weight -= weight
            raise

        def ended(_: asyncio.Future[Result]) -> None:
            self._slots.release()
            self.weight -= weight

        thread = asyncio.get_running_loop().run_in_executor(None, work)
        thread.add_done_callback(ended)
        return await asyncio.shield(thread)


@dataclass(slots=True, eq=False)
class _Piece(Generic[Result]):
    """work that waits. result: for its caller."""

    work: Callable[[], Result]
    weight: int
    result: "asyncio.Future[Result]"


class TurnLimiter(Generic[Result]):
    """`await limiter.run(work, weight, key)`: one thread runs; keys with work that waits take turns.

    Weights are as of `ConcurrencyLimiter`. A key cannot take all of `max_weight`, so that others' work finds a place.
    """

    def __init__(self, max_weight: int, work: str) -> None:
        """work: words for a refusal, behind "Too many"."""
        self._max_weight = max_weight
        self._work = work
        self._waiting: OrderedDict[Hashable, deque[_Piece[Result]]] = OrderedDict()  # the first key is next
        self._weights: dict[Hashable, int] = {}  # of each key's pieces, running and waiting
        self._is_running = False
        self._closed = ""  # why no more work is taken

    async def run(self, work: Callable[[], Result], weight: int, key: Hashable) -> Result:
        """The result of `work`. Raises QueueFull at once when too much work runs and waits already, and NotReady after `close`.

        A thread cannot be cancelled: the work of a cancelled caller counts until its thread has ended.
        """
        if self._closed:
            raise NotReady(self._closed)
        self._check_capacity(weight, key)
        piece: _Piece[Result] = _Piece(work, weight, asyncio.get_running_loop().create_future())
        self._weights[key] = self._weights.get(key, 0) + weight
        self._waiting.setdefault(key, deque()).append(piece)
        self._start_next()
        try:
            return await piece.result
        finally:
            if piece in self._waiting.get(key, ()):  # the caller is cancelled
                self._waiting[key].remove(piece)
                self._end(piece, key)

    def close(self, reason: str) -> None:
        """Raise NotReady for work that waits and for later work. Work that runs is not ended."""
        self._closed = reason
        for pieces in self._waiting.values():
            for piece in pieces:
                if not piece.result.done():
                    piece.result.set_exception(NotReady(reason))

    def _check_capacity(self, weight: int, key: Hashable) -> None:
        left = self._max_weight - sum(self._weights.values())
        if self._weights and (weight > left or self._weights.get(key, 0) >= _TIMES_LEFT * left):
            raise QueueFull(f"Too many {self._work} at once.")

    def _start_next(self) -> None:
        if self._is_running or self._closed:
            return
        for key, pieces in self._waiting.items():
            if pieces:
                self._start(pieces.popleft(), key)
                return

    def _start(self, piece: _Piece[Result], key: Hashable) -> None:
        self._is_running = True

        def ended(thread: asyncio.Future[Result]) -> None:
            self._is_running = False
            self._waiting.move_to_end(key)
            self._end(piece, key)
            error = None if thread.cancelled() else thread.exception()
            if piece.result.done():
                pass
            elif thread.cancelled():
                piece.result.cancel()
            elif error is not None:
                piece.result.set_exception(error)
            else:
                piece.result.set_result(thread.result())
            self._start_next()

        asyncio.get_running_loop().run_in_executor(None, piece.work).add_done_callback(ended)

    def _end(self, piece: _Piece[Result], key: Hashable) -> None:
        """Count the piece no more, and forget a key without others."""
        self._weights[key] -= piece.weight
        if not self._weights[key]:
            del self._weights[key], self._waiting[key]
