"""The load client: reading received bytes, and requests to a real server."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.harness.load import Answer, HttpSession, Load, drive, read_answer
from benchmarks.harness.workload import Request, uniform_batch
from llama_core.errors import NonFiniteLogits
from tests.support.scripted_engine import MODEL_ID, FakeEngine, serve

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"text": text, "finish_reason": reason}])


def read(pieces: Sequence[tuple[float, bytes]]) -> Answer:
    return read_answer(0.0, 9.0, pieces)


def test_a_tokens_time_is_when_its_event_was_complete() -> None:
    first, second = chunk(token("a")), chunk(token("b"))
    answer = read(
        [
            (1.0, HEAD),
            (2.0, first + second[:20]),
            (3.0, second[20:]),
            (4.0, chunk(token("c") + token("", "length")) + chunk(event(choices=[], usage={"completion_tokens": 3}))),
            (5.0, chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"),
        ]
    )
    assert answer == Answer(0.0, 9.0, [2.0, 3.0, 4.0], 3)


def test_a_token_without_text_counts_and_a_final_event_without_a_token_does_not() -> None:
    body = chunk(token("")) + chunk(token("é")) + chunk(token("", "stop")) + chunk(b"data: [DONE]\n\n")
    assert read([(1.0, HEAD + body)]).token_times == [1.0, 1.0]


def test_a_body_without_chunked_encoding_is_read() -> None:
    head = HEAD.replace(b"transfer-encoding: chunked\r\n", b"")
    answer = read([(1.0, head + token("a")), (2.0, token("b") + b"data: [DONE]\n\n")])
    assert answer.token_times == [1.0, 2.0]


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nnot now", "HTTP 503 Service Unavailable: not now"),
        (HEAD + chunk(token("a")) + chunk(event(error={"message": "bad"})), "bad"),
        (HEAD + chunk(token("a")), "without [DONE]"),
        (HEAD + chunk(token("a"))[:-5], "without [DONE]"),
        (b"", "HTTP"),
    ],
)
def test_an_incomplete_or_failed_stream_is_an_error(raw: bytes, error: str) -> None:
    assert error in (read([(1.0, raw)]).error or "")


def test_figures_are_of_successful_requests_and_count_the_failed() -> None:
    good = Answer(10.0, 12.0, [10.5, 11.0, 12.0], 3)
    figures = Load([good, Answer(10.0, 10.1, error="no")], seconds=2.0, client_cpu_s=0.5).figures()
    assert (figures["requests"], figures["failed"], figures["errors"]) == (1, 1, ["no"])
    assert figures["output_tok_s"] == 1.5
    assert figures["ttft_p50_ms"] == 500
    assert figures["between_p50_ms"] == 750
    assert figures["decode_tok_s"] == pytest.approx(2 / 1.5)
    assert figures["client_cpu_cores"] == 0.25
    with pytest.raises(ValueError, match="every request failed: no"):
        Load([Answer(0, 1, error="no")], 1.0, 0.0).figures()


class CountingSession(HttpSession):
    """Answers after a moment, and counts the sessions with a request in flight."""

    open = most = 0

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1", MODEL_ID)
        self.asked: list[Request] = []

    async def ask(self, request: Request) -> None:
        CountingSession.open += 1
        CountingSession.most = max(CountingSession.most, CountingSession.open)
        await asyncio.sleep(0.001)
        CountingSession.open -= 1
        self.asked.append(request)

    def answers(self) -> list[Answer]:
        return [Answer(0.0, 1.0, [0.5], 1) for _ in self.asked]

    async def close(self) -> None:
        pass


async def test_a_closed_loop_sends_each_request_once_with_one_in_flight_per_client() -> None:
    requests = uniform_batch(11, 4, 1, 100)
    sessions = [CountingSession() for _ in range(3)]
    load = await drive(sessions, requests)
    asked = [request for session in sessions for request in session.asked]
    assert sorted(asked, key=lambda request: request.prompt) == sorted(requests, key=lambda request: request.prompt)
    assert CountingSession.most == 3
    assert len(load.answers) == 11


@pytest.mark.parametrize("new_connections", [False, True])
async def test_every_token_arrives_over_kept_and_over_new_connections(new_connections: bool) -> None:
    with serve(FakeEngine("One two three four five.")) as served:
        sessions = [HttpSession(served.url, MODEL_ID, new_connections=new_connections) for _ in range(2)]
        load = await drive(sessions, uniform_batch(6, 8, 20, 200))
        for session in sessions:
            await session.close()
        assert [stream.params.max_tokens for stream in served.engine.streams] == [20] * 6
        assert all(stream.params.ignore_eos for stream in served.engine.streams)
    figures = load.figures()
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (6, 0, 120)
    assert all(answer.began_s < answer.token_times[0] <= answer.ended_s for answer in load.answers)


async def test_refusals_failures_and_a_missing_server_are_counted() -> None:
    with serve(FakeEngine()) as served:
        served.engine.fail_at = (3, NonFiniteLogits("this one fails"))
        session = HttpSession(served.url, MODEL_ID)
        load = await drive([session], uniform_batch(2, 8, 10, 200))
        assert ["this one fails" in (answer.error or "") for answer in load.answers] == [True, True]
        load = await drive([HttpSession(served.url, "another-model")], uniform_batch(1, 8, 10, 200))
        assert (load.answers[0].error or "").startswith("HTTP 404")
        await session.close()
    load = await drive([HttpSession(served.url, MODEL_ID)], uniform_batch(1, 8, 10, 200))
    assert (load.answers[0].error or "").startswith("HTTP 000")


async def test_the_end_of_a_body_is_found_however_its_bytes_are_split() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nkeep-alive: timeout=5, max=100\r\n\r\n"
    body = chunk(token("a")) + chunk(b"data: [DONE]\n\n")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(json.dumps(await asked)))
                for piece in (head, body, b"0\r", b"\n\r\n"):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)

    asked: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    request = Request([3, 4], 1)
    session = HttpSession("http://127.0.0.1:1", "m")
    asked.set_result(json.loads(session._message(request).partition(b"\r\n\r\n")[2]))
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        session = HttpSession(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m")
        load = await drive([session], [request, request])
        await session.close()
    assert [(one.error, len(one.token_times)) for one in load.answers] == [(None, 1), (None, 1)]


async def test_a_connection_that_the_server_closed_between_requests_is_reopened() -> None:
    event = b'data: {"choices": [{"index": 0, "text": "a"}], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n'
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
        writer.write(answer)
        await reader.read(1)  # the next request's first byte
        writer.close()

    server = await asyncio.start_server(once, "127.0.0.1", 0)
    async with server:
        session = HttpSession(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "any")
        for _ in range(3):
            await session.ask(Request([5], 1))
        await session.close()
    assert [answer.error for answer in session.answers()] == [None] * 3
