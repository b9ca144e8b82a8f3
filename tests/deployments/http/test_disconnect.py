"""A disconnect cancels the work on its request with RequestCancelled; other cancellations pass unchanged."""

import asyncio

import pytest
from starlette.types import Message

from deployments.http.disconnect import DisconnectScope, DisconnectWatch
from llama_core.errors import RequestCancelled


class Client:
    """A client whose `receive` waits until the client disconnects."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def work_for(client: Client) -> None:
    async with DisconnectWatch(client.receive):
        await asyncio.sleep(10)


async def test_a_disconnect_cancels_the_work() -> None:
    client = Client()
    working = asyncio.create_task(work_for(client))
    await asyncio.sleep(0)
    client.left.set()
    with pytest.raises(RequestCancelled):
        await working
    assert working.cancelling() == 0


async def test_a_disconnect_after_the_work_cancels_nothing() -> None:
    client = Client()
    async with DisconnectWatch(client.receive) as scope:
        await asyncio.sleep(0)
    client.left.set()
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) == 1, "the watching task has ended"
    del scope


@pytest.mark.parametrize("leaves_too", [False, True])
async def test_a_cancellation_from_outside_passes_through(leaves_too: bool) -> None:
    client = Client()
    working = asyncio.create_task(work_for(client))
    await asyncio.sleep(0)
    if leaves_too:
        client.left.set()
        await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert working.cancelled()


async def test_an_exception_of_the_work_passes_through() -> None:
    with pytest.raises(ValueError, match="of its own"):
        async with DisconnectWatch(Client().receive):
            raise ValueError("of its own")


async def test_the_first_cancellation_decides_the_error() -> None:
    async def work() -> None:
        with DisconnectScope() as scope:
            loop = asyncio.get_running_loop()
            loop.call_soon(scope.cancel, TimeoutError("too slow"))
            loop.call_soon(scope.cancel, RequestCancelled("left"))
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError, match="too slow"):
        await asyncio.create_task(work())
