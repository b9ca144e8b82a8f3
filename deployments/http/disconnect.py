"""Ends work on a request from outside, for whatever reason: its client leaves, or does not read.

By cancelling the request's own task, as `asyncio.timeout` does, so that the work needs no task of its own.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType

from starlette.types import Receive

from llama_core.errors import RequestCancelled


class Interruption:
    """`with Interruption() as ending:` a block that `ending.interrupt(error)` cancels and makes raise `error`.

    Anybody else's cancelling of the task goes through.
    """

    def __enter__(self) -> "Interruption":
        task = asyncio.current_task()
        assert task is not None, "only a task can be cancelled"
        self._task = task
        self._num_cancels = task.cancelling()
        self._error: Exception | None = None
        return self

    def interrupt(self, error: Exception) -> None:
        """Not from inside the block. The first call counts."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._error is not None:
            is_only_ours = self._task.uncancel() <= self._num_cancels
            if is_only_ours and kind is asyncio.CancelledError:
                raise self._error from None


@contextlib.asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[Interruption]:
    """A block that is interrupted with RequestCancelled when the client leaves.

    Only after the whole body has been read: the next message is then the client's leaving.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ending.interrupt(RequestCancelled("the client left"))

    with Interruption() as ending:
        watching = asyncio.create_task(watch())
        try:
            yield ending
        finally:
            watching.cancel()
