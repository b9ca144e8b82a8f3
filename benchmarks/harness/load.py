"""A closed loop of streaming requests by a light client, because the client shares the server's cores.

A session stores received bytes with their times and decodes them after the clock has stopped.
"""

import asyncio
import json
import statistics
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, cast
from urllib.parse import urlsplit

from benchmarks.harness.common import percentile
from benchmarks.harness.workload import Request

# The empty chunk that ends a body. It cannot occur inside an event, because JSON has no bare line break.
_END_OF_CHUNKS = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """One request as its client saw it; times in seconds of time.perf_counter.

    token_times: one for each event with a token or more. num_tokens: the server's count. status: of HTTP, 0 without an answer.
    retry_after: the header, if there was one.
    """

    began_s: float
    ended_s: float
    token_times: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None
    status: int = 200
    retry_after: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """The result of a load: every answer, and the seconds from the first request's start to the last answer's end."""

    answers: list[Answer]
    seconds: float
    client_cpu_s: float  # processor time of this process meanwhile

    def figures(self) -> dict[str, Any]:
        """Output tokens a second, times to the first token and between two tokens of one answer, in milliseconds.

        Failed requests count in `failed` only. Raises ValueError if all failed.
        """
        good = [answer for answer in self.answers if answer.error is None and answer.token_times]
        failed = [answer.error or "the answer has no token" for answer in self.answers if answer not in good]
        if not good:
            raise ValueError(f"every request failed: {failed[0] if failed else 'no request was sent'}")
        first = [1e3 * (answer.token_times[0] - answer.began_s) for answer in good]
        gaps = [1e3 * (after - before) for answer in good for before, after in pairwise(answer.token_times)] or [0.0]
        tokens = sum(answer.num_tokens for answer in good)
        return {
            "requests": len(good),
            "failed": len(failed),
            "errors": sorted(set(failed))[:3],
            "seconds": self.seconds,
            "output_tokens": tokens,
            "output_tok_s": tokens / self.seconds,
            "requests_s": len(good) / self.seconds,
            "ttft_p50_ms": percentile(first, 50),
            "ttft_p99_ms": percentile(first, 99),
            "between_p50_ms": percentile(gaps, 50),
            "between_p99_ms": percentile(gaps, 99),
            # The mean gap of each answer: unlike the median gap it does not improve when several tokens arrive at once.
            "per_token_p50_ms": percentile([_per_token_ms(answer) for answer in good], 50),
            # Rate of each answer from its first token to its last: the decode rate, where there is one client.
            "decode_tok_s": statistics.median(_decode_tok_s(answer) for answer in good),
            "tokens_per_event": tokens / sum(len(answer.token_times) for answer in good),
            "client_cpu_cores": self.client_cpu_s / self.seconds,
        }


def _decode_tok_s(answer: Answer) -> float:
    """Tokens a second after the first event, which counts as one token; 0 if no event followed."""
    seconds = answer.token_times[-1] - answer.token_times[0]
    return (answer.num_tokens - 1) / seconds if seconds else 0.0


def _per_token_ms(answer: Answer) -> float:
    rate = _decode_tok_s(answer)
    return 1e3 / rate if rate else 0.0


class HttpSession:
    """Streams completions from an OpenAI-compatible server over one connection, reopened when the server closes it.

    extra: further fields of the request's body. new_connections: one for each request.
    """

    def __init__(
        self, base_url: str, model: str, extra: dict[str, Any] | None = None, new_connections: bool = False
    ) -> None:
        parts = urlsplit(base_url)
        assert parts.scheme == "http" and parts.hostname, "a plain http URL"
        self._host, self._port = parts.hostname, parts.port or 80
        self._path = parts.path.rstrip("/") + "/v1/completions"
        self._model = model
        self._extra = extra or {}
        self._new_connections = new_connections
        self._connection: _Connection | None = None
        self._seen: list[tuple[float, float, list[tuple[float, bytes]]]] = []

    async def ask(self, request: Request) -> None:
        message = self._message(request)
        began = time.perf_counter()
        pieces: list[tuple[float, bytes]] = []
        try:
            is_new = self._connection is None or self._connection.closed
            pieces = await (await self._open()).exchange(message)
            if (
                not pieces and not is_new
            ):  # HTTP allows the server to close an idle connection while the request is in flight
                pieces = await (await self._open()).exchange(message)
        except OSError as error:
            pieces = [(time.perf_counter(), f"HTTP/1.1 000 {error}\r\n\r\n".encode())]
        self._seen.append((began, time.perf_counter(), pieces))
        if self._new_connections:
            await self.close()

    def answers(self) -> list[Answer]:
        seen, self._seen = self._seen, []
        return [read_answer(*one) for one in seen]

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    async def _open(self) -> "_Connection":
        if self._connection is None or self._connection.closed:
            loop = asyncio.get_running_loop()
            _, self._connection = await loop.create_connection(_Connection, self._host, self._port)
        return self._connection

    def _message(self, request: Request) -> bytes:
        body = json.dumps(completion_body(self._model, request, self._extra)).encode()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer none\r\nContent-Length: {len(body)}\r\n"
            f"Connection: {'close' if self._new_connections else 'keep-alive'}\r\n\r\n"
        )
        return head.encode() + body


class _Connection(asyncio.Protocol):
    """One connection: sends a message and stores the pieces of the answer with their times."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._pieces: list[tuple[float, bytes]] = []
        self._missing: int | None = None  # bytes left of a body with a Content-Length
        self._tail = b""  # the last bytes received, as long as the end marker
        self._done: asyncio.Future[None] | None = None

    async def exchange(self, message: bytes) -> list[tuple[float, bytes]]:
        assert self._transport is not None
        self._pieces, self._missing, self._tail = [], None, b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        await self._done
        return self._pieces

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._pieces.append((time.perf_counter(), data))
        if self._missing is not None:
            self._missing -= len(data)
        elif len(self._pieces) == 1:
            head, end, body = data.partition(b"\r\n\r\n")
            fields = head.lower()
            if end and b"content-length:" in fields:
                self._missing = int(fields.split(b"content-length:")[1].split(b"\r\n")[0]) - len(body)
        self._tail = (self._tail + data[-len(_END_OF_CHUNKS) :])[-len(_END_OF_CHUNKS) :]
        if self._tail == _END_OF_CHUNKS or (self._missing is not None and self._missing <= 0):
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._finish()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


async def drive(sessions: Sequence[HttpSession], requests: Iterable[Request]) -> Load:
    """Closed loop: each session sends the next request when its last one has ended."""
    waiting = iter(requests)

    async def work(session: HttpSession) -> None:
        for request in waiting:
            await session.ask(request)

    cpu, begin = time.process_time(), time.perf_counter()
    await asyncio.gather(*(work(session) for session in sessions))
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return Load([answer for session in sessions for answer in session.answers()], seconds, cpu)


def completion_body(model: str, request: Request, extra: dict[str, Any]) -> dict[str, Any]:
    """A streamed completion of exactly as many tokens as `request` asks for."""
    return {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.num_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }


# Reading answers after the clock has stopped.


def brings_token(event: dict[str, Any]) -> bool:
    """Whether an event has a token. The text of a token may be empty; a final event without a token has a finish reason."""
    choices = event.get("choices") or []
    return bool(choices) and (bool(choices[0].get("text")) or choices[0].get("finish_reason") is None)


def read_answer(began_s: float, ended_s: float, pieces: Sequence[tuple[float, bytes]]) -> Answer:
    """Read an HTTP answer of server-sent events from its bytes and their times."""
    raw = b"".join(data for _, data in pieces)
    head, _, body = raw.partition(b"\r\n\r\n")
    status = head.split(b"\r\n")[0].split(b" ", 1)[-1].decode(errors="replace")
    if not status.startswith("200"):
        lines = (line.partition(b":") for line in head.split(b"\r\n"))
        retry = next((value.strip().decode() for name, _, value in lines if name.lower() == b"retry-after"), None)
        error = f"HTTP {status}: {body[:200].decode(errors='replace')}".strip()
        number = int(status[:3]) if status[:3].isdigit() else 0
        return Answer(began_s, ended_s, error=error, status=number, retry_after=retry)
    ends = list(accumulate(len(data) for _, data in pieces))
    token_times: list[float] = []
    num_tokens, is_whole = None, False
    for event, position in _events(raw, len(head) + 4, b"chunked" in head.lower()):
        if event == b"[DONE]":
            is_whole = True
            continue
        said = json.loads(event)
        if said.get("error"):
            return Answer(began_s, ended_s, token_times, error=str(said["error"])[:200])
        if usage := said.get("usage"):
            num_tokens = usage["completion_tokens"]
        if brings_token(said):
            token_times.append(pieces[bisect_left(ends, position)][0])
    if not is_whole:
        return Answer(began_s, ended_s, token_times, error="the stream ended without [DONE]")
    return Answer(began_s, ended_s, token_times, len(token_times) if num_tokens is None else num_tokens)


def _events(raw: bytes, start: int, is_chunked: bool) -> Iterator[tuple[bytes, int]]:
    """The data of each event, and the number of bytes of `raw` up to its end."""
    body, place = bytearray(), start
    borders: list[tuple[int, int]] = []  # (end in body, end in raw) of each chunk
    while place < len(raw):
        if not is_chunked:
            body += raw[place:]
            borders = [(i + 1, place + i + 1) for i in range(len(body))]
            break
        line_end = raw.find(b"\r\n", place)
        if line_end < 0:
            break  # a truncated body
        size = int(raw[place:line_end].split(b";")[0], 16)
        begin = line_end + 2
        body += raw[begin : begin + size]
        borders.append((len(body), min(begin + size, len(raw))))
        place = begin + size + 2
    ends = [end for end, _ in borders]
    offset = 0
    while (end := body.find(b"\n\n", offset)) >= 0:
        data = b"".join(line[5:].strip() for line in bytes(body[offset:end]).split(b"\n") if line.startswith(b"data:"))
        offset = end + 2
        if data:
            yield data, borders[bisect_left(ends, offset)][1]
