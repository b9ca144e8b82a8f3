"""Processes of Serve are killed under live streams: the controller, the replica and HAProxy."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.chaos.asks import Ask
from tests.chaos.load import Heard, hear
from tests.support.joined_events import id_of, joined
from tests.support.otlp_collector import Traced
from tests.support.server import CHAT, COMPLETIONS, Server
from tests.support.waiting import until, until_true

pytestmark = pytest.mark.timeout(600)

NUM_STREAMS = 6
HELLO = {"messages": [{"role": "user", "content": "Tell me a story about a dog."}], "max_tokens": 48}
TALE = {"prompt": "once upon a time", "stream_options": {"include_usage": True}, "max_tokens": 48}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
TOOL = {"type": "function", "function": {"name": "go", "parameters": PERSON}}  # a long one would not fit the context
VARYING = ("message_start.message.usage.output_tokens",)
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "two choices": (COMPLETIONS, TALE | {"n": 2, "ignore_eos": True}),
    "logprobs": (COMPLETIONS, TALE | {"logprobs": 3, "echo": True}),
    "penalties": (COMPLETIONS, TALE | {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "min_tokens": 8}),
    "chat": (CHAT, HELLO | {"logprobs": True, "top_logprobs": 2, "n": 2}),
    "stop": (CHAT, HELLO | {"stop": [" a ", "the"]}),
    "schema": (CHAT, HELLO | {"structured_outputs": {"json": PERSON}}),
    "tools": (CHAT, HELLO | {"tools": [TOOL], "tool_choice": "required"}),
    "messages": ("/v1/messages", HELLO),
    "responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": 48}),
}


def client_of(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=180, trust_env=False, headers=server.headers)


async def events(client: httpx.AsyncClient, kind: str, last: str = "", most: int | None = None) -> list[bytes]:
    """The first events of a stream, `most` at most; the connection is broken after them. last: the id of the last one."""
    path, body = REQUESTS[kind]
    body = body | {"temperature": 0.9, "stream": True}  # the server draws the seed
    headers = {"Idempotency-Key": kind} | ({"Last-Event-ID": last} if last else {})
    received = b""
    async with client.stream("POST", path, json=body, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for piece in answer.aiter_raw():
            received += piece
            if most is not None and len(_events(received)) >= most:
                break
    return _events(received)[:most]


def _events(received: bytes) -> list[bytes]:
    return [event for event in received.split(b"\n\n")[:-1] if not event.startswith(b":")]


def comparable(found: list[bytes]) -> list[Any]:
    """What they add up to, without the number of cached tokens, which depends on earlier requests, and that of the first event,
    which has as many as there were."""
    return [(place, value) for place, value in joined(found) if "cache" not in place and place not in VARYING]


@pytest.fixture
def server(traced: Traced) -> Server:
    return traced.server


def asks(num_tokens: int = 300) -> list[Ask]:
    body = {"model": "llama-demo", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    return [
        Ask("greedy", "/v1/completions", body | {"prompt": f"story {number}: once"}) for number in range(NUM_STREAMS)
    ]


async def streams(
    server: Server, meanwhile: Callable[[], Awaitable[None]] | None = None, num_tokens: int = 300
) -> list[Heard]:
    """The answer of each stream; `meanwhile` is called when all streams have begun."""
    async with client_of(server) as client:
        heard = [Heard() for _ in range(NUM_STREAMS)]
        hearing = [
            asyncio.create_task(hear(client, ask, each)) for ask, each in zip(asks(num_tokens), heard, strict=True)
        ]
        if meanwhile is not None:
            await until_true("every stream has begun", lambda: all(each.times or each.error for each in heard))
            await meanwhile()
            assert not all(each.done for each in heard), "streams were live meanwhile"
        return await asyncio.gather(*hearing)


async def answers(server: Server) -> None:
    """Wait for the first complete answer."""

    async def is_answered() -> bool:
        async with client_of(server) as client:
            heard = await hear(client, asks(20)[0])
        return heard.error is None and heard.done

    await until("an answer is complete", is_answered, 240, 0.2)


def processes(server: Server, name: str) -> set[int]:
    return {pid for pid, command in server.processes().items() if name in command}


def kill(server: Server, name: str) -> set[int]:
    """Kill the processes of that name; at least one."""
    killed = set()
    for pid in processes(server, name):
        with contextlib.suppress(ProcessLookupError):  # an HAProxy that a reload has replaced ends by itself
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    assert killed
    return killed


def contents(heard: list[Heard]) -> list[tuple[object, ...]]:
    return [each.content for each in heard]


async def test_no_request_fails_when_serves_controller_is_killed(server: Server) -> None:
    undisturbed = await streams(server)
    assert all(heard.done and heard.error is None for heard in undisturbed)
    killed: set[int] = set()

    async def kill_it() -> None:
        killed.update(kill(server, "ray::ServeController"))

    assert contents(await streams(server, kill_it)) == contents(undisturbed)
    assert contents(await streams(server)) == contents(undisturbed)
    await until_true("Serve has a new controller", lambda: processes(server, "ray::ServeController") - killed)
    assert server.get("/ready")[0] == 200


async def test_a_killed_replica_breaks_its_streams_visibly_and_another_one_goes_on_with_them(server: Server) -> None:
    async with client_of(server) as client:
        first = {kind: await events(client, kind, most=8) for kind in REQUESTS}
    ranks = {rank["pid"] for rank in server.get("/props")[1]["ranks"]} | processes(server, "ray::RankWorker")

    async def kill_it() -> None:
        kill(server, "ray::ServeReplica")

    heard = await streams(server, kill_it, 4000)  # so that none has ended when the replica is killed
    assert all(each.error is not None and not each.done for each in heard), "no stream ends without an error"
    looks: list[tuple[int, object]] = []

    async def is_ready() -> bool:
        status, body = await asyncio.to_thread(server.get, "/ready")
        looks.append((status, body.get("phase")))
        return status == 200

    await until("the new replica is ready", is_ready, 240, 0.05)
    # 502 where the replica ended between a connection and its answer.
    assert {status for status, _ in looks} - {502} == {200, 503} and all(phase for _, phase in looks), (
        "never a plain 500"
    )
    assert len(looks) > 3, "no look waited for the new replica"
    await until_true("the killed replica's ranks have ended", lambda: not ranks & server.processes().keys(), 60)
    await answers(server)
    props = server.get("/props")[1]
    assert not ranks & {rank["pid"] for rank in props["ranks"]}
    replica = processes(server, "ray::ServeReplica")
    assert len(replica) == 1
    async with client_of(server) as client:
        for kind, begun in first.items():
            rest = await events(client, kind, id_of(begun[-1]))
            assert comparable(begun + rest) == comparable(await events(client, kind)), kind


async def test_a_killed_haproxy_is_replaced_and_the_ranks_keep_running(server: Server) -> None:
    before = server.get("/props")[1]
    killed = kill(server, "bin/haproxy")
    await answers(server)
    assert processes(server, "bin/haproxy") and not processes(server, "bin/haproxy") & killed
    assert server.get("/props")[1]["ranks"] == before["ranks"]
