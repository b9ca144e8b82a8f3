"""Slow, numerous and disconnected clients of a whole server: HAProxy or Serve's proxy, a replica, ranks.

Each of them gets our own error or a closed connection, delays no other client, and leaves no resource in use.
"""

import asyncio
import contextlib
import itertools
import socket
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import psutil
import pytest

from deployments.http.limits import HttpLimits
from tests.servers.conftest import THROUGH_HAPROXY
from tests.support.server import (
    COMPLETIONS,
    Answer,
    Server,
    ask,
    connect,
    is_idle,
    message,
    num_descriptors,
    num_generated,
    resident_bytes,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

SEND_TIMEOUT_S = HttpLimits().send_timeout_s
NUM_STALLED = 16
NUM_IDLE = 600
LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "temperature": 1.5}


@pytest.fixture(scope="module")
def servers(demo: Server, request: pytest.FixtureRequest) -> list[Server]:
    """The server behind HAProxy, and with --full the one behind Serve's proxy."""
    return [demo, *([request.getfixturevalue("plain")] if request.config.getoption("--full") else [])]


@pytest.fixture(scope="module", autouse=True)
def stalled(servers: list[Server]) -> Iterator[list[socket.socket]]:
    """A client of each server that reads nothing of its stream, started now for the last test, which needs half a minute to
    have passed. Its stream is larger than the kernel's buffers."""
    body = LONG | {"stream": True, "n": NUM_STALLED, "logprobs": 20}
    connections = []
    for server in servers:
        before = num_generated(server)
        connections.append(connect(server, receive_buffer=4096))
        connections[-1].sendall(message(COMPLETIONS, body))
        # The whole answer is generated, or its client was disconnected.
        most = before + NUM_STALLED
        wait_until("the stream has begun", lambda s=server, n=most: num_generated(s) >= n)  # type: ignore[misc]
        wait_until("the stream has ended", partial(is_idle, server), 240)
    yield connections
    for connection in connections:
        connection.close()


@pytest.fixture(autouse=True)
def _canary(servers: list[Server], stalled: object) -> Iterator[None]:
    """Check after each test that the servers answer, hold no request, and have the same processes."""
    before = [processes(server) for server in servers]
    yield
    for server, then in zip(servers, before, strict=True):
        wait_until("the server is idle after the test", partial(is_idle, server))
        answer = asyncio.run(ask(server, message(COMPLETIONS, {"prompt": "Are you there?", "max_tokens": 2})))
        assert answer.status == 200
        assert processes(server) == then


def state(server: Server) -> dict[str, Any]:
    status, props = server.get("/props")
    assert status == 200, server.output()[-3000:]
    return props


def processes(server: Server) -> tuple[list[int], ...]:
    """The pids of ranks, replica and proxies."""
    ranks = [rank["pid"] for rank in state(server)["ranks"]]
    names = ("/haproxy ", "ProxyActor", "ServeReplica")
    return ranks, sorted(pid for pid, command in server.processes().items() if any(name in command for name in names))


def assert_others_are_served(server: Server) -> None:
    """Check that health checks and other requests are answered."""
    for request in (
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        message(COMPLETIONS, {"prompt": "Hello", "max_tokens": 2}),
    ):
        assert asyncio.run(ask(server, request)).status == 200


def first_line(connection: socket.socket) -> bytes:
    """The first line of the answer, b"" if the connection is closed without one."""
    try:
        return connection.recv(65536).split(b"\r\n")[0]
    except ConnectionResetError:
        return b""


def test_slow_senders_and_idle_connections_delay_no_one_and_are_closed(servers: list[Server]) -> None:
    """More slow bodies than the limits for running and waiting requests, half-sent headers, and idle connections."""
    before = [num_descriptors(server) for server in servers]
    heads, bodies, idle_ones = [], [], []
    for server in servers:
        for _ in range(350):  # 288 run and wait
            bodies.append(connect(server))
            bodies[-1].sendall(message(COMPLETIONS, b"{", length=5000))
    for server in servers:
        for _ in range(50):
            heads.append(connect(server))
            heads[-1].sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ".encode())
        idle_ones += [connect(server) for _ in range(NUM_IDLE)]
    for _ in range(3):
        for connection in itertools.chain(heads, bodies):
            with contextlib.suppress(OSError):  # on a slow machine the server may have closed it
                connection.sendall(b" ")
        for server in servers:
            assert_others_are_served(server)
        time.sleep(0.5)
    assert {first_line(connection) for connection in bodies} == {b"HTTP/1.1 400 Bad Request"}
    # Serve's own proxy waits for headers without limit, as operations.md says; HAProxy does not.
    behind_haproxy = heads[:50] + idle_ones[:NUM_IDLE]
    assert {first_line(connection) for connection in behind_haproxy} <= {b"HTTP/1.1 408 Request Time-out", b""}
    for connection in itertools.chain(heads, bodies, idle_ones):
        connection.close()
    for server, descriptors in zip(servers, before, strict=True):
        most = descriptors + 20
        wait_until("the connections are closed", lambda s=server, n=most: num_descriptors(s) <= n)  # type: ignore[misc]


def test_unfinished_headers_are_refused_by_haproxy_and_delay_no_one(servers: list[Server]) -> None:
    requests = [
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"a" * 2**20 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(5_000)) + b"\r\n",
        b"GET /" + b"a" * 2**20 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ]
    for server, (request, also_whole) in itertools.product(servers, zip(requests, (True, True, False), strict=True)):
        with connect(server) as connection:
            with contextlib.suppress(OSError):  # the server has closed the connection
                connection.sendall(request)
            status = first_line(connection).split()[1:2]
            assert status in ([b"400"], [b"414"], []) or server is not servers[0], status
            assert status != [b"500"] and (not also_whole or status in ([b"200"], [b"400"], []))
        assert_others_are_served(server)


@pytest.mark.parametrize("count", [400, pytest.param(1000, marks=pytest.mark.full)])
@THROUGH_HAPROXY
def test_simultaneous_streams_are_complete_or_refused_with_retry_after(server: Server, count: int) -> None:
    async def all_at_once() -> list[Answer]:
        bodies = [
            {"prompt": [1, 5 + i % 200], "max_tokens": 4, "stream": True, "ignore_eos": True} for i in range(count)
        ]
        return await asyncio.gather(*(ask(server, message(COMPLETIONS, body)) for body in bodies))

    answers = asyncio.run(all_at_once())
    counts = Counter(answer.status for answer in answers)
    assert set(counts) <= {200, 429} and counts[200] >= 32 + 256, counts
    for answer in answers:
        if answer.status == 200:
            reasons = [chunk["choices"][0]["finish_reason"] for chunk in answer.events()]
            assert [reason for reason in reasons if reason] == ["length"] and reasons[-1] == "length"
        else:
            assert answer.error()["code"] == "queue_full" and int(answer.headers["retry-after"]) >= 1


def test_a_client_that_does_not_read_is_disconnected_and_its_blocks_are_freed(
    servers: list[Server], stalled: list[socket.socket]
) -> None:
    """Through HAProxy. Serve's own proxy buffers the whole answer, so there the client holds that memory until it disconnects;
    its cache blocks are free as soon as its tokens are generated."""
    # HAProxy ends it after about two minutes, the server 30 s after all buffers are full. The client cannot see it before it
    # reads, because its full buffer keeps the FIN back, and reading would end the stall.
    warning = "a client did not read its stream"
    at = stalled[0].getpeername(), stalled[0].getsockname()

    def is_disconnected() -> bool:
        open_ones = (each for each in psutil.net_connections("tcp4") if each.status == psutil.CONN_ESTABLISHED)
        return warning in servers[0].output() or at not in [(each.laddr, each.raddr) for each in open_ones]

    wait_until("it is disconnected", is_disconnected, 10 * SEND_TIMEOUT_S, pause_s=0.5)
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := stalled[0].recv(2**20):
            received += piece
    assert received.startswith(b"HTTP/1.1 200") and not received.endswith(b"0\r\n\r\n") and b"[DONE]" not in received
    for server in servers:
        wait_until("the server is idle", partial(is_idle, server))
    assert resident_bytes(servers[0]) < 2**30
