"""Processes of Serve are killed under live streams: the controller, HAProxy, the replica, and finally all at once."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

import httpx
import pytest

from tests.chaos.load import Ask, Heard, hear
from tests.support.server import Server, served

NUM_STREAMS = 8


SHARED_MEMORY_BEFORE: set[str] = set()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    SHARED_MEMORY_BEFORE.update(os.listdir("/dev/shm"))
    with served(args={"max_seq_len": 4096}) as running:
        running.wait_ready()
        yield running


def asks(num_tokens: int = 1000) -> list[Ask]:
    body = {"model": "llama-demo", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    return [
        Ask("greedy", "/v1/completions", body | {"prompt": f"story {number}: once"}) for number in range(NUM_STREAMS)
    ]


async def streams(
    server: Server, meanwhile: Callable[[], Awaitable[None]] | None = None, num_tokens: int = 1000
) -> list[Heard]:
    """The answer of each stream; `meanwhile` is called when all streams have begun."""
    async with httpx.AsyncClient(base_url=server.url, timeout=180, trust_env=False) as client:
        heard = [Heard() for _ in range(NUM_STREAMS)]
        hearing = [
            asyncio.create_task(hear(client, ask, each)) for ask, each in zip(asks(num_tokens), heard, strict=True)
        ]
        if meanwhile is not None:
            async with asyncio.timeout(60):
                while not all(each.times for each in heard):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await meanwhile()
        return await asyncio.gather(*hearing)


async def answers(server: Server, timeout_s: float) -> Heard:
    """Wait for the first complete answer."""
    deadline = time.monotonic() + timeout_s
    async with httpx.AsyncClient(base_url=server.url, timeout=timeout_s, trust_env=False) as client:
        while True:
            heard = await hear(client, asks(20)[0])
            if heard.error is None and heard.done:
                return heard
            assert time.monotonic() < deadline, heard.error
            await asyncio.sleep(0.2)


def processes(server: Server, name: str) -> set[int]:
    return {pid for pid, command in server.processes().items() if name in command}


def kill(server: Server, name: str) -> set[int]:
    found = processes(server, name)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    assert found
    return found


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
    async with asyncio.timeout(120):
        while not processes(server, "ray::ServeController") - killed:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert server.get("/ready")[0] == 200


async def test_a_killed_replica_breaks_its_streams_visibly_and_is_replaced(server: Server) -> None:
    ranks = {rank["pid"] for rank in server.get("/props")[1]["ranks"]} | processes(server, "ray::RankWorker")
    killed_at = 0.0

    async def kill_it() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        kill(server, "ray::ServeReplica")

    heard = await streams(server, kill_it)
    assert all(each.error is not None and not each.done for each in heard), "no stream merely stops"
    while ranks & server.processes().keys():
        assert time.monotonic() - killed_at < 30
        await asyncio.sleep(0.2)
    await answers(server, 240)
    props = server.get("/props")[1]
    assert not ranks & {rank["pid"] for rank in props["ranks"]}
    replica = processes(server, "ray::ServeReplica")
    assert len(replica) == 1


async def test_a_killed_haproxy_is_replaced_and_the_ranks_keep_running(server: Server) -> None:
    before = server.get("/props")[1]
    kill(server, "bin/haproxy")
    assert server.get("/ready")[0] == 0
    await answers(server, 240)
    assert server.get("/props")[1]["ranks"] == before["ranks"]


async def test_every_replica_completes_its_live_streams_at_a_shutdown() -> None:
    args = {"model_parallel_size": 1, "cpus_per_rank": 1, "spare_ranks": False, "max_seq_len": 4096}
    with served(args=args, num_replicas=2) as server:
        running: dict[int, int] = {}  # by the pid of a replica's rank

        async def look() -> None:
            status, props = await asyncio.to_thread(server.get, "/props")
            if status == 200 and props["ranks"]:
                running[props["ranks"][0]["pid"]] = props["requests_running"]

        async def end_it() -> None:
            running.clear()
            while sum(num > 0 for num in running.values()) < 2:
                await look()
            server.process.send_signal(signal.SIGINT)

        server.wait_ready()
        async with asyncio.timeout(120):
            while len(running) < 2:
                await look()
        heard = await streams(server, end_it, 1500)
        assert all(running.values()), "a replica had no stream: this shows nothing"
        assert all(each.error is None and each.done for each in heard)
        assert server.process.wait(180) == 0


def test_a_signal_to_the_process_group_ends_every_process(server: Server) -> None:
    """As systemd ends a service: Ray's own processes get the signal too, so no stream can be drained."""
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.process.wait(120) == 0
    assert not server.wait_gone()
    deadline = time.monotonic() + 20  # other tests that run now may have files there for a moment
    while (left := set(os.listdir("/dev/shm")) - SHARED_MEMORY_BEFORE) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "shared memory of the killed ranks"
