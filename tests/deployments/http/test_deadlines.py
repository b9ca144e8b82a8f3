"""Deadlines: the shorter of the request's and the server's limit ends a request and frees its sequences."""

import asyncio
import logging

import httpx
import pytest
from starlette.types import Message

from deployments.http.disconnect import DisconnectScope, DisconnectWatch
from deployments.http.limits import HttpLimits
from deployments.http.request_id import TIMEOUT_HEADER
from llama_core.errors import RequestCancelled
from tests.support.scripted_engine import MODEL_ID, FakeEngine, in_process

BODY = {"model": MODEL_ID, "prompt": "hi", "max_tokens": 200, "ignore_eos": True}


def http(engine: FakeEngine, limits: HttpLimits | None = None) -> httpx.AsyncClient:
    return in_process(engine, limits=limits)


@pytest.mark.parametrize("where", ["header", "server", "both"])
async def test_an_answer_that_takes_too_long_is_ended_with_504(where: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llama.requests")
    engine = FakeEngine(step_s=0.2)
    limits = HttpLimits(request_timeout_s={"header": None, "server": 0.1, "both": 0.1}[where])
    headers = {} if where == "server" else {TIMEOUT_HEADER: "0.1" if where == "header" else "50"}
    async with http(engine, limits) as client:
        answer = await client.post("/v1/completions", json=BODY, headers=headers)
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded" and "0.1 s" in answer.json()["error"]["message"]
    assert engine.num_open == 0 and all(stream.cancelled for stream in engine.streams)
    [line] = [record for record in caplog.records if record.name == "llama.requests"]
    assert "deadline_exceeded" in line.getMessage()
    assert line.levelno == (logging.INFO if where == "header" else logging.ERROR), "a client's own limit is no failure"


async def test_a_stream_gets_an_error_event_and_no_done() -> None:
    engine = FakeEngine(step_s=0.05)
    async with http(engine) as client:
        answer = await client.post("/v1/completions", json={**BODY, "stream": True}, headers={TIMEOUT_HEADER: "3"})
    assert answer.status_code == 200
    events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert len(events) > 2 and "deadline_exceeded" in events[-1] and "[DONE]" not in answer.text
    assert engine.num_open == 0


async def test_a_waiting_request_ends_at_its_deadline() -> None:
    engine = FakeEngine()
    engine.hold = asyncio.Event()
    async with http(engine) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={TIMEOUT_HEADER: "0.05"})
    assert answer.status_code == 504 and engine.num_open == 0


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
async def test_an_invalid_time_limit_is_refused(value: str) -> None:
    engine = FakeEngine()
    async with http(engine) as client:
        answer = await client.post("/v1/completions", json=BODY, headers={TIMEOUT_HEADER: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == TIMEOUT_HEADER
    assert not engine.streams


# A disconnect cancels the work on its request; other cancellations pass unchanged.


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


async def test_the_first_cancellation_decides_the_error() -> None:
    async def work() -> None:
        with DisconnectScope() as scope:
            loop = asyncio.get_running_loop()
            loop.call_soon(scope.cancel, TimeoutError("too slow"))
            loop.call_soon(scope.cancel, RequestCancelled("left"))
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError, match="too slow"):
        await asyncio.create_task(work())
