"""Models without an engine: what a front lists, and how their first requests get one."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from unittest import mock

import httpx
import pytest

from deployments.args import IngressArgs
from deployments.fleet.cluster import FRONT, Sleeping
from deployments.replicas.front_process import FrontProcess
from tests.support.fake_cluster import FakeCluster, Member, QuietMetrics, Replica
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fleets import FakeEngineProcess
from tests.support.recovering_service import steady
from tests.support.virtual_loop import BOTH_ORDERS
from tests.support.virtual_network import Process

LOOPS = BOTH_ORDERS
START_S = 5.0
ASK = {"prompt": "Once upon a time", "max_tokens": 8}


def paced() -> FakeGroup:
    return FakeGroup(num_blocks=400, step_s=0.05, token=steady)


class Sleepy:
    """A cluster with the application `one` of the model `demo`, whose engines end and start as Serve's would."""

    def __init__(self, *fronts: FrontProcess) -> None:
        self.cluster = FakeCluster(running={"llama", "one"}, asleep={"demo": Sleeping("one")})
        self.engines: list[FakeEngineProcess] = []
        self._serve = asyncio.create_task(self._start_when_invited())

    async def front(self, **args: Any) -> FrontProcess:
        front = FrontProcess(IngressArgs(**args), Member(self.cluster, "llama"), QuietMetrics())
        self.cluster.replicas.append(Replica(FRONT, Process("front"), front))
        await front.check_health()
        return front

    async def _start_when_invited(self) -> None:
        while True:
            await until(lambda: len(self.cluster.invited) > len(self.engines), timeout_s=10_000)
            await asyncio.sleep(START_S)
            engine = FakeEngineProcess(paced, Member(self.cluster, "one"))
            self.engines.append(engine)
            await engine.start()
            self.cluster.asleep = {}

    async def sleep(self) -> None:
        await self.engines[-1].engine.end()
        self.cluster.remove(self.engines[-1].engine)
        self.cluster.asleep = {"demo": Sleeping("one")}

    async def stop(self, *fronts: FrontProcess) -> None:
        self._serve.cancel()
        for front in fronts:
            await front.end()
        for engine in self.engines:
            await engine.stop()


@asynccontextmanager
async def http_of(front: FrontProcess) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(front._http_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None) as client:
        yield client


async def statuses(client: httpx.AsyncClient) -> dict[str, str]:
    return {model["id"]: model["status"] for model in (await client.get("/v1/models")).json()["data"]}


async def test_a_burst_for_a_model_that_a_front_has_never_seen_makes_one_call_and_is_answered() -> None:
    fleet = Sleepy()
    front = await fleet.front()
    async with http_of(front) as client:
        assert await statuses(client) == {"demo": "sleeping"}
        assert (await client.get("/v1/models/demo")).json()["status"] == "sleeping"
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["phase"]) == (200, "sleeping")
        began_s = time.monotonic()
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=ASK | {"model": "demo"}) for _ in range(10)),
            *(client.post("/v1/completions", json=ASK | {"stream": True}) for _ in range(10)),
            client.post("/tokenize", json={"prompt": "Once"}),
        )
        assert [answer.status_code for answer in answers] == [200] * 21
        assert time.monotonic() - began_s < START_S + 2
        assert fleet.cluster.invited == ["one"]
        assert await statuses(client) == {"demo": "ready"}
        unknown = await client.post("/v1/completions", json=ASK | {"model": "other"})
        assert unknown.status_code == 404
    await fleet.stop(front)


async def test_a_front_that_has_seen_the_model_plans_at_once_and_its_streams_ping_until_the_engine_is_there() -> None:
    fleet = Sleepy()
    front = await fleet.front(hold_timeout_s=60)
    async with http_of(front) as client:
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
        await asyncio.sleep(20)
        for wake in (2, 3):
            await fleet.sleep()
            await asyncio.sleep(120)  # longer than hold_timeout_s: it is no model that has lost its engine
            assert await statuses(client) == {"demo": "sleeping"} and front.fleet.describe().phase == "sleeping"
            began_s = time.monotonic()
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=ASK | {"stream": True}) for _ in range(20))
            )
            assert all(answer.status_code == 200 and "[DONE]" in answer.text for answer in answers)
            assert time.monotonic() - began_s < START_S + 2
            assert fleet.cluster.invited == ["one"] * wake
            assert await statuses(client) == {"demo": "ready"}
    await fleet.stop(front)


async def test_a_stream_that_an_engine_leaves_behind_wakes_the_model() -> None:
    """The engine ends while Serve has not said so yet, or another front's request came too late."""
    fleet = Sleepy()
    front = await fleet.front()
    async with http_of(front) as client:
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
        await asyncio.sleep(20)
        ending = asyncio.create_task(fleet.sleep())
        await asyncio.sleep(0)
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
        await ending
        assert fleet.cluster.invited == ["one", "one"]
    await fleet.stop(front)


async def test_without_an_engine_in_time_requests_end_with_503_and_later_ones_ask_again() -> None:
    fleet = Sleepy()
    fleet._serve.cancel()
    front = await fleet.front(hold_timeout_s=3)
    async with http_of(front) as client:
        for calls in (1, 2):
            began_s = time.monotonic()
            answer = await client.post("/v1/completions", json=ASK)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_ready"
            assert time.monotonic() - began_s < 4
            assert fleet.cluster.invited == ["one"] * calls
    await fleet.stop(front)


async def test_a_call_that_fails_is_made_again_while_requests_wait() -> None:
    """As where the controller, or the head, is away."""
    fleet = Sleepy()
    front = await fleet.front()
    calls = 0

    async def fails_first(application: str) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError
        return await Member(fleet.cluster).invite(application)

    front.fleet._sleeping._invite = fails_first
    async with http_of(front) as client:
        assert (await client.post("/v1/completions", json=ASK)).status_code == 200
    assert calls == 2
    await fleet.stop(front)


async def test_searches_wake_no_model_and_a_front_that_drains_none_either() -> None:
    fleet = Sleepy()
    front = await fleet.front()
    await asyncio.sleep(100)
    assert not fleet.cluster.invited
    async with http_of(front) as client:
        await front.fleet.drain()
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/v1/completions", json=ASK)).status_code == 503
    assert not fleet.cluster.invited
    await fleet.stop(front)


async def test_an_adapter_of_a_sleeping_model_is_known_and_a_client_that_leaves_waits_no_more() -> None:
    fleet = Sleepy()
    fleet.cluster.asleep = {"demo": Sleeping("one", {"poet"})}
    front = await fleet.front()
    waiting = asyncio.create_task(front.fleet.meet_model("poet"))
    await until(lambda: bool(fleet.cluster.invited))
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert front.fleet._sleeping.awaited == {}
    await front.fleet.meet_model("other")
    await fleet.stop(front)


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_removed_application_does_not_sleep(is_known: bool) -> None:
    fleet = Sleepy()
    front = await fleet.front()
    async with http_of(front) as client:
        if is_known:
            await client.post("/v1/completions", json=ASK)
            await fleet.sleep()
            await asyncio.sleep(20)
        fleet.cluster.running, fleet.cluster.asleep = {"llama"}, {}
        await asyncio.sleep(20)
        assert await statuses(client) == {}
        assert (await client.post("/v1/completions", json=ASK)).status_code == 503
    await fleet.stop(front)


async def test_requests_for_a_model_whose_application_is_removed_while_they_wait_end_soon() -> None:
    fleet = Sleepy()
    fleet._serve.cancel()
    front = await fleet.front()
    async with http_of(front) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK | {"model": "demo"}))
        await until(lambda: bool(fleet.cluster.invited))
        fleet.cluster.running, fleet.cluster.asleep = {"llama"}, {}
        answer = await asyncio.wait_for(asking, 15)
        assert answer.status_code == 503 and "has been removed" in answer.text
    await fleet.stop(front)


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_model_sleeps_on_while_the_controller_does_not_answer(is_known: bool) -> None:
    fleet = Sleepy()
    front = await fleet.front(hold_timeout_s=30)
    async with http_of(front) as client:
        if is_known:
            await client.post("/v1/completions", json=ASK)
            await fleet.sleep()
            await asyncio.sleep(15)
        fleet.cluster.asleep = None
        await asyncio.sleep(60)
        assert await statuses(client) == {"demo": "sleeping"}
        assert (await client.post("/v1/completions", json=ASK | {"model": "demo"})).status_code == 200
    await fleet.stop(front)


async def test_a_client_that_leaves_before_the_model_wakes_waits_no_more() -> None:
    fleet = Sleepy()
    fleet._serve.cancel()
    front = await fleet.front()
    inbox = asyncio.Queue[dict[str, Any]]()
    body = json.dumps(ASK | {"model": "demo", "stream": True}).encode()
    inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "scheme": "http",
        "http_version": "1.1",
        "headers": headers,
    }
    scope |= {"path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "", "query_string": b""}
    scope |= {"client": ("127.0.0.1", 1), "server": ("localhost", 80), "state": {}}

    async def send(message: Any) -> None:
        pass

    asking = asyncio.create_task(front._http_app(scope, inbox.get, send))
    await until(lambda: front.fleet._sleeping.awaited)
    inbox.put_nowait({"type": "http.disconnect"})
    await asyncio.wait([asking], timeout=5)
    assert asking.done() and not front.fleet._sleeping.awaited
    await fleet.stop(front)


async def test_a_held_stream_makes_no_more_searches() -> None:
    fleet = Sleepy()
    front = await fleet.front()
    async with http_of(front) as client:
        await client.post("/v1/completions", json=ASK)
        fleet._serve.cancel()
        await fleet.sleep()
        fleet.cluster.asleep = {}
        await asyncio.sleep(30)
        asking = asyncio.create_task(client.post("/v1/completions", json=ASK))
        await asyncio.sleep(2)
        with mock.patch.object(Member, "applications", wraps=front._cluster.applications) as searches:
            await asyncio.sleep(100)
        assert searches.call_count <= 15
        asking.cancel()
    await fleet.stop(front)
