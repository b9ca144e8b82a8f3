"""Cancels the work on one request whose client disconnects, stops reading, or sends its body too slowly.

The scope cancels the request's own task, as `asyncio.timeout` does, so the work needs no task of its own.
"""

import asyncio
from copy import copy
from types import TracebackType

from starlette.types import Receive

from llama_core.errors import RequestCancelled


class DisconnectScope:
    """`with DisconnectScope() as scope:` a block that `scope.cancel(error)` cancels and makes raise `error`.

    Any other cancellation of the task passes through unchanged.
    """

    def __enter__(self) -> "DisconnectScope":
        task = asyncio.current_task()
        assert task is not None, "only a task can be cancelled"
        self._task = task
        self._num_cancels = task.cancelling()
        self._error: Exception | None = None
        return self

    def cancel(self, error: Exception) -> None:
        """To be called from outside the block. Only the first call has an effect."""
        if self._error is None:
            self._error = error
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._error is not None:
            is_only_ours = self._task.uncancel() <= self._num_cancels
            if is_only_ours and kind is asyncio.CancelledError:
                raise copy(self._error) from None  # a raised error holds this frame, and so this object


class DisconnectWatch:
    """`async with DisconnectWatch(receive) as scope:` a block that raises RequestCancelled when the client disconnects.

    Enter it after the whole body has been read, because the next ASGI message is then the disconnect. A class, because a
    generator would cost every request more.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._scope = DisconnectScope()

    async def __aenter__(self) -> DisconnectScope:
        self._scope.__enter__()
        self._watching = asyncio.create_task(_watch(self._receive, self._scope))
        return self._scope

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watching.cancel()
        self._scope.__exit__(kind, value, traceback)


async def _watch(receive: Receive, scope: DisconnectScope) -> None:
    """A function: as a method, the traceback of the cancelled task would be part of a reference cycle with its owner."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel(RequestCancelled("the client disconnected"))
