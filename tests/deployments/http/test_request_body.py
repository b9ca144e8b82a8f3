"""Bodies through raw sockets: size limits, declared lengths, chunked and slow bodies, and connections that are closed."""

import asyncio
import gzip
import json
import select
import socket
import zlib
from collections.abc import Iterator

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from deployments.http import request_body
from deployments.http import request_id as middleware
from deployments.http.limits import HttpLimits
from deployments.http.request_body import BodyLimits, BodyReader
from deployments.openai.errors import InvalidJson
from llama_core.errors import QueueFull
from tests.support import http
from tests.support.scripted_engine import FakeEngine, Served, canary, serve
from tests.support.waiting import wait_until

CAP = 64 * 1024
TIMEOUT_S = 3.0  # time for the parts of a body, also on a slow machine
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(FakeEngine(), HttpLimits(body=BodyLimits(max_bytes=CAP, timeout_s=TIMEOUT_S))) as running:
        yield running


@pytest.fixture(autouse=True)
def _canary(served: Served) -> Iterator[None]:
    yield
    canary(served)


def exchange(served: Served, *parts: bytes) -> tuple[int, dict[str, str]]:
    """Sends the parts one after the other; returns the status and the error of the answer."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        received = b""
        while b"\r\n\r\n" not in received or not received.endswith(b"}"):
            received += (chunk := connection.recv(65536))
            if not chunk:
                break
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_declared_length_over_the_cap_is_413_before_any_of_it_is_sent(served: Served) -> None:
    status, error = exchange(served, HEAD + b"Content-Length: %d\r\n\r\n" % (CAP + 1))
    assert (status, error["code"]) == (413, "body_too_large"), "408 would mean that the server waited for the body"
    assert str(CAP) in error["message"]


def test_a_chunked_body_over_the_cap_is_413_while_it_is_read(served: Served) -> None:
    chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
    status, error = exchange(served, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 5)
    assert (status, error["code"]) == (413, "body_too_large")


def test_a_body_shorter_than_its_declared_length_is_400_and_names_both(served: Served) -> None:
    status, error = exchange(served, HEAD + b"Content-Length: 100\r\n\r\n", b'{"prompt": "x"}')
    assert (status, error["code"]) == (400, "incomplete_body")
    assert "100" in error["message"]
    assert "15" in error["message"]


def test_a_body_longer_than_its_declared_length_is_400(served: Served) -> None:
    """The HTTP parser may answer before the application: it reads the surplus bytes as a malformed next request."""
    body = b'{"prompt": 3}'
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (len(body) - 1) + body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_a_body_of_one_byte_at_a_time_ends_at_the_deadline(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(int(20 * TIMEOUT_S / 0.1)):
            if select.select([connection], [], [], 0.1)[0]:
                break
            connection.sendall(b"1\r\n{\r\n")
        else:
            pytest.fail("each byte began a new deadline")
        received = connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"Content-Length: %d\r\n\r\n" % (CAP + 1),
        b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ],
    ids=["too large", "chunked"],
)
def test_a_connection_answered_before_its_body_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.3)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as connection:
        connection.sendall(head)
        answer = connection.recv(65536)
        assert b"\r\nconnection: close\r\n" in answer.lower()

        def is_closed() -> bool:
            try:
                connection.sendall(b"1")
            except (ConnectionResetError, BrokenPipeError):
                return True
            return False

        wait_until("the server closes the connection", is_closed, 60, 0.02)


def test_an_answer_after_the_whole_body_keeps_the_connection(served: Served) -> None:
    with httpx.Client(base_url=served.url) as client:
        for body in ({"prompt": 3}, {"prompt": "x"}):
            answer = client.post("/v1/completions", json=body)
            assert "connection" not in answer.headers


async def test_the_bytes_of_pending_bodies_have_a_bound() -> None:
    bodies = BodyReader(BodyLimits(max_bytes=100, most_pending=2))
    release = asyncio.Event()

    def request(*pieces: bytes) -> Request:
        async def receive() -> Message:
            if left:
                return {"type": "http.request", "body": left.pop(0), "more_body": True}
            await release.wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        left = list(pieces)
        return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)

    async def length(*pieces: bytes) -> int:
        async with bodies.received(request(*pieces)) as raw:
            return len(raw)

    reading = [asyncio.create_task(length(b"x" * 50, b"x" * 50)) for _ in range(2)]
    await asyncio.sleep(0)
    assert bodies.num_pending_bytes == 200
    with pytest.raises(QueueFull):
        await length(b"x" * 50, b"x" * 50)
    small = asyncio.create_task(length(b"{}"))  # a body of one piece is always taken
    await asyncio.sleep(0)
    release.set()
    assert [await task for task in (*reading, small)] == [100, 100, 2]
    assert bodies.num_pending_bytes == 0


COMPLETION = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
GZIPPED = gzip.compress(COMPLETION, mtime=0)  # the workers of pytest-xdist compare the names of tests


def post_gzip(served: Served, content: bytes, encoding: str = "gzip") -> httpx.Response:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    return http.post(served.url + "/v1/completions", content=content, headers=headers)


def test_a_gzip_body_and_a_byte_order_mark_are_read(served: Served) -> None:
    assert post_gzip(served, gzip.compress(COMPLETION)).status_code == 200
    assert post_gzip(served, COMPLETION, "identity").status_code == 200
    assert post_gzip(served, gzip.compress(b"\xef\xbb\xbf" + COMPLETION)).status_code == 200
    headers = {"content-type": "application/json"}
    marked = http.post(served.url + "/v1/completions", content=b"\xef\xbb\xbf" + COMPLETION, headers=headers)
    assert marked.status_code == 200


def test_a_small_gzip_of_a_large_body_is_413_and_frees_what_was_pending(served: Served) -> None:
    bomb = gzip.compress(b'{"prompt": "' + b"x" * (50 * CAP) + b'"}')
    assert len(bomb) < CAP
    answer = post_gzip(served, bomb)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("content", "encoding", "status", "code"),
    [
        (COMPLETION, "gzip", 400, "invalid_json"),
        (GZIPPED[:-9], "gzip", 400, "invalid_json"),
        (GZIPPED[:5], "gzip", 400, "invalid_json"),
        (GZIPPED + b"x", "gzip", 400, "invalid_json"),
        (b"", "gzip", 400, "invalid_json"),
        (COMPLETION, "br", 415, "unsupported_media_type"),
        (GZIPPED, "gzip, gzip", 415, "unsupported_media_type"),
    ],
)
def test_other_encodings_and_damaged_gzip_are_refused(
    served: Served, content: bytes, encoding: str, status: int, code: str
) -> None:
    answer = post_gzip(served, content, encoding)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


BLOCK = b"\0\0\0\xff\xff"  # of deflate, without content
GZIP_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"


def gzip_with_empty_blocks(pieces: list[bytes]) -> bytes:
    """The pieces as one gzip stream, with 20 blocks without content after each."""
    deflate = zlib.compressobj(0, wbits=-zlib.MAX_WBITS)
    blocks = [deflate.compress(piece) + deflate.flush(zlib.Z_FULL_FLUSH) + 20 * BLOCK for piece in pieces]
    plain = b"".join(pieces)
    end = zlib.crc32(plain).to_bytes(4, "little") + len(plain).to_bytes(4, "little")
    return GZIP_HEAD + b"".join(blocks) + deflate.flush() + end


@pytest.mark.parametrize(
    "content",
    [
        GZIP_HEAD + BLOCK * 10_000,
        GZIP_HEAD[:3] + b"\x08" + GZIP_HEAD[4:] + b"n" * 50_000,  # a file name without an end
    ],
    ids=["empty blocks", "a name"],
)
def test_a_gzip_body_that_holds_nothing_is_refused_before_it_is_read_whole(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "MOST_WITHOUT_CONTENT", 40_000)
    pieces: list[bytes] = []
    with pytest.raises(InvalidJson, match="40000 bytes more than what it holds"):
        pieces.extend(request_body.gunzipped(content))
    assert pieces == [b"", b""]


async def test_other_tasks_run_while_a_gzip_body_of_many_empty_blocks_is_read() -> None:
    """For each 16 KiB that arrive compressed, other tasks have a turn, also while several such bodies are read."""
    plain = b"{" + b" " * 3000 + b"}"
    content = gzip_with_empty_blocks([plain[i : i + 2000] for i in range(0, len(plain), 2000)] * 100)
    bodies, num_turns = BodyReader(BodyLimits()), 0

    async def receive() -> Message:
        return {"type": "http.request", "body": content, "more_body": False}

    async def read() -> None:
        headers = [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")]
        async with bodies.received(Request({"type": "http", "headers": headers}, receive)) as raw:
            assert raw == plain * 100

    reading = asyncio.gather(*(read() for _ in range(3)))
    while not reading.done():
        num_turns += 1
        await asyncio.sleep(0)
    await reading
    assert num_turns >= 3 * len(content) / request_body.INPUT_BYTES
    assert bodies.num_pending_bytes == 0
