"""Calls that work only in the main thread, for coroutines of another thread."""

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class MainThread:
    """Runs calls that work only in the main thread for a coroutine of another thread, whose streams go on meanwhile."""

    def __init__(self) -> None:
        self._calls: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue()

    async def run(self, call: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return await asyncio.wrap_future(future)

    def serve_until(self, done: Future[Any]) -> None:
        while not done.done():
            try:
                future, call = self._calls.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
