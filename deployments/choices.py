"""All the choices of one request as one stream that ends as one, and the watch for a client that leaves.

A failure of one choice ends all, and `cancel` frees every choice's cache blocks. Knows nothing of how an answer looks.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from deployments.engine import Delta, Engine, TokenStream
from deployments.plan import Plan
from llama_core.errors import RequestCancelled
from llama_core.request import FinishReason

Result = TypeVar("Result")


class Choices:
    """Every choice of a plan, read as one: `start`, `next` until `num_open` is 0, `cancel`.

    One task reads each choice into a queue that holds one delta a choice, so that none starves another and a slow
    reader leaves its tokens in the engine, which joins them into larger deltas.
    """

    def __init__(self, engine: Engine, plan: Plan) -> None:
        """Submits every choice, or none: raises what `Engine.submit` raised for the first that was refused."""
        self.streams: list[TokenStream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue(plan.num_choices)
        self._first: tuple[int, Delta] | None = None
        self.num_open = plan.num_choices
        try:
            for prompt, params in plan.choices():
                self.streams.append(engine.submit(prompt, params, stop=plan.stop))
        except BaseException:
            self.cancel()
            raise

    def start(self) -> None:
        """Begin to read. Whoever calls this calls `cancel` in the end."""
        self._tasks = [asyncio.create_task(self._read(i, stream)) for i, stream in enumerate(self.streams)]

    def cancel(self) -> None:
        """Idempotent; never waits, so that it works while a cancelled task is unwound."""
        for task in self._tasks:
            task.cancel()
        for stream in self.streams:
            stream.cancel()

    async def first(self, timeout_s: float) -> None:
        """Wait until something can be read, or for so long. Raises the error if the first thing is one."""
        self._first = await self._take(timeout_s)

    async def next(self, timeout_s: float | None = None) -> tuple[int, Delta] | None:
        """The next (choice, delta), or None when nothing came for so long. Safe to cancel: nothing is lost.

        Raises what ended a choice. Call it while `num_open` is not 0.
        """
        item, self._first = self._first or await self._take(timeout_s), None
        if item is not None and item[1].finish_reason is not None:
            self.num_open -= 1
        return item

    async def _take(self, timeout_s: float | None) -> tuple[int, Delta] | None:
        try:
            async with asyncio.timeout(timeout_s):
                index, delta = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(delta, Exception):
            raise delta
        return index, delta

    async def _read(self, index: int, stream: TokenStream) -> None:
        try:
            async for delta in stream:
                if delta.finish_reason is FinishReason.ABORT:
                    raise RequestCancelled("the server stopped this request")
                await self._queue.put((index, delta))
                if delta.finish_reason is not None:
                    return
            raise AssertionError("a stream ended without a finish reason")
        except Exception as error:
            await self._queue.put((index, error))


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves; then RequestCancelled is raised.

    Only after the whole body has been read: the next message is then the client's leaving.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RequestCancelled("the client left")
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
