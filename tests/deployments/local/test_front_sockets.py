"""Serve's own HTTP servers, patched: on private sockets, with bounded heads, and without chunk sizes for HTTP/1.0."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import uvicorn
from ray.serve._private import http_util
from ray.serve.config import HTTPOptions

from benchmarks.harness.programs import free_port
from deployments.serve_headers import middlewares


async def app(scope: Any, receive: Any, send: Any) -> None:
    """A stream of two chunks."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for body in (b"one ", b"two"):
        await send({"type": "http.response.body", "body": body, "more_body": body != b"two"})


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A replica on the node of a small cluster. Returns its socket."""
    monkeypatch.setattr(http_util, "uvicorn", uvicorn)
    context = SimpleNamespace(get_actor_name=lambda: "SERVE_REPLICA::llama#LlamaIngress#a1b2c3d4")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.setenv("LLAMA_FRONT_SOCKETS", str(tmp_path / "fronts"))
    return tmp_path / "fronts" / "a1b2c3d4"


@asynccontextmanager
async def serving(port: int) -> AsyncIterator[None]:
    """As Serve starts the server of a replica."""
    middlewares()
    options = HTTPOptions(host="127.0.0.1", port=port)
    loop = asyncio.get_running_loop()
    task, server = await http_util.start_asgi_http_server(app, options, event_loop=loop)
    while not server.started:
        assert not task.done(), task.exception()
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        await task


async def answer(address: Path | int, *parts: bytes) -> bytes:
    """All bytes until the server closes the connection."""
    if isinstance(address, Path):
        reader, writer = await asyncio.open_unix_connection(address)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", address)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await reader.read()
    except ConnectionError:  # the answer was lost: the server closed before it had read all
        return b""
    finally:
        writer.close()


CLOSE = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


async def test_a_server_of_a_small_cluster_answers_on_its_socket_alone_and_holds_its_port(node: Path) -> None:
    port = free_port()
    async with serving(port):
        assert b"transfer-encoding: chunked" in await answer(node, CLOSE)
        with pytest.raises(ConnectionRefusedError):
            await answer(port, CLOSE)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
    assert node.parent.stat().st_mode & 0o777 == 0o700


async def test_where_other_nodes_need_its_port_a_server_answers_there_too(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.1")
    port = free_port()
    async with serving(port):
        assert b" 200 OK" in await answer(node, CLOSE)
        assert b" 200 OK" in await answer(port, CLOSE)


async def test_without_haproxy_serves_proxy_listens_as_serve_has_it(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    port = free_port()
    async with serving(port):
        assert b" 200 OK" in await answer(port, CLOSE)
    assert not node.exists()  # noqa: ASYNC240


async def test_a_stream_over_http_1_0_has_no_chunk_sizes_and_ends_with_its_connection(node: Path) -> None:
    async with serving(free_port()):
        head, _, body = (await answer(node, b"GET / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert body == b"one two" and b"transfer-encoding" not in head and b"connection: close" in head
        chunked = (await answer(node, CLOSE)).partition(b"\r\n\r\n")[2]
        assert chunked == b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_an_endless_head_is_refused_at_64_kib(node: Path) -> None:
    """Beyond, httptools would copy all of it for each packet: 16 MiB stop the event loop for seconds."""
    async with serving(free_port()), asyncio.timeout(20):
        refused = await answer(node, b"GET / HTTP/1.1\r\nX: ", *[b"a" * 2**14] * 2**6)
        assert refused[:13] in (b"", b"HTTP/1.1 400 ")


async def test_heads_after_large_bodies_and_long_ones_pass(node: Path) -> None:
    post = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n" + b"b" * 200_000
    async with serving(free_port()):
        assert (await answer(node, post, CLOSE)).count(b" 200 OK") == 2
        long = CLOSE.replace(b"Host: a", b"Host: a\r\nX: " + b"a" * 60 * 2**10)
        assert b" 200 OK" in await answer(node, *[long[i : i + 2**12] for i in range(0, len(long), 2**12)])
