"""Reads a request's body and turns it into a checked object, or raises an error that repeats none of it.

Raw bytes first, with a cap and a deadline, then strict JSON, then the schema. Parsing holds the interpreter's lock, so
the time to parse a body is bounded before it is parsed, and large bodies are parsed one at a time in a thread.
"""

import asyncio
import re
import sys
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Receive

from deployments.http.disconnect import DisconnectScope
from deployments.http.request_id import headers_of
from deployments.openai.errors import BodyTimeout, BodyTooLarge, IncompleteBody, InvalidJson, UnsupportedMediaType
from deployments.openai.limiter import ConcurrencyLimiter
from deployments.openai.parse_cost import MOST_IN_WORDS, begin_body, takes_too_long
from deployments.openai.validation import BodyT, validate
from llama_core.errors import QueueFull, RequestCancelled

Result = TypeVar("Result")

MAX_FIELDS = 1000  # of the body itself: the schema checks each of them
# Larger bodies, and those with more objects, are parsed in a thread; to parse so many bytes takes 3 ms at most, and to check
# so many objects, such as messages, 5 ms.
INLINE_BYTES = 128 * 2**10
INLINE_OBJECTS = 256

# By the beginning of jiter's message: what is wrong with a body whose syntax is right.
JSON_FAULTS = {
    "recursion limit exceeded": "is nested too deep",
    "number out of range": "has a number with too many digits",
    "lone leading surrogate": "has a lone surrogate",
    "unexpected end of hex escape": "has a lone surrogate",
}


@dataclass(frozen=True, slots=True)
class BodyLimits:
    max_bytes: int = 16 * 2**20
    timeout_s: float = 10.0  # from the first byte awaited to the last one received
    most_pending: int = 8  # bodies of max_bytes, or more smaller ones, that are being received or wait to be parsed


class BodyReader:
    """Reads the bodies of one replica's requests, and counts the bytes of bodies that have not been parsed."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        # A second thread would only wait for the interpreter's lock. `num_pending_bytes` bounds the waiting bodies.
        self._parsing = ConcurrencyLimiter(at_once=1, max_weight=sys.maxsize)
        self._decompressing = asyncio.Lock()
        self.num_pending_bytes = 0
        self.max_bytes = limits.max_bytes

    def received(self, request: Request) -> "ReceivedBody":
        """`async with bodies.received(request) as raw:` the whole body, which counts as pending inside the block.

        Raises an InvalidRequest when the body is not JSON by its type, too large, too slow or cut short; QueueFull when too
        many bytes are pending.
        """
        return ReceivedBody(self, request)

    async def receive(self, request: Request, body: bytearray) -> None:
        """Appends the body to `body`, and counts it as pending."""
        limits = self._limits
        headers = headers_of(request.scope)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise UnsupportedMediaType("The body must be JSON: send it with Content-Type: application/json.")
        compressed = is_compressed(headers.get("content-encoding", ""))
        declared = _declared_length(headers)
        if declared is not None and declared > limits.max_bytes:
            raise _too_large(limits)
        with DisconnectScope() as scope:  # costs less than asyncio.timeout
            timer = asyncio.get_running_loop().call_later(limits.timeout_s, self._end_late, scope, declared, body)
            try:
                await self._append_pieces(request.receive, body)
            finally:
                timer.cancel()
        if declared is not None and declared != len(body):
            raise IncompleteBody(_mismatch(declared, len(body)))
        if compressed:
            await self._decompress(body)

    async def _append_pieces(self, receive: Receive, body: bytearray) -> None:
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestCancelled("the client disconnected before its request was complete")
            piece, has_more = message.get("body", b""), message.get("more_body", False)
            self._append(piece, body, is_bounded=bool(body and piece))  # a body of one piece is always taken

    def _append(self, piece: bytes, body: bytearray, *, is_bounded: bool) -> None:
        limits = self._limits
        body += piece
        self.num_pending_bytes += len(piece)
        if len(body) > limits.max_bytes:
            raise _too_large(limits)
        if is_bounded and self.num_pending_bytes > limits.most_pending * limits.max_bytes:
            raise QueueFull("Too many large bodies are arriving at once.")

    def _end_late(self, scope: DisconnectScope, declared: int | None, body: bytearray) -> None:
        """Makes the block of `scope` raise what is wrong with a body that is not complete in time."""
        timeout_s = self._limits.timeout_s
        if declared is None:
            scope.cancel(BodyTimeout(f"The body did not arrive within {timeout_s:g} s."))
        else:
            scope.cancel(IncompleteBody(_mismatch(declared, len(body), f" within {timeout_s:g} s")))

    async def _decompress(self, body: bytearray) -> None:
        """Replaces gzip by what it holds, which counts as pending too. Other tasks run between two pieces, of any bodies."""
        plain = bytearray()
        try:
            pieces = gunzipped(body)
            while True:
                async with self._decompressing:
                    piece = next(pieces, None)
                    await asyncio.sleep(0)
                if piece is None:
                    break
                self._append(piece, plain, is_bounded=True)
        except BaseException:
            self.num_pending_bytes -= len(plain)
            raise
        self.num_pending_bytes -= len(body)
        body[:] = plain

    async def parse(self, raw: bytes, kind: type[BodyT]) -> BodyT:
        """The body as a `kind`. Raises InvalidJson, InvalidParameter, InvalidDialog or Unsupported."""
        if len(raw) <= INLINE_BYTES and raw.count(b"{") <= INLINE_OBJECTS:
            return validate(kind, parse_json(raw))
        return await self._parsing.run(lambda: validate(kind, parse_json(raw)))

    async def run(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Work on a body of this size: a long one in the thread that parses."""
        return work() if num_bytes <= INLINE_BYTES else await self._parsing.run(work)


class ReceivedBody:
    """The block of `BodyReader.received`: a class, because a generator would cost every request more."""

    def __init__(self, reader: BodyReader, request: Request) -> None:
        self._reader, self._request = reader, request
        self._body = bytearray()

    async def __aenter__(self) -> bytes:
        try:
            await self._reader.receive(self._request, self._body)
        except BaseException:
            self._reader.num_pending_bytes -= len(self._body)
            raise
        return bytes(self._body)

    async def __aexit__(self, *_: object) -> None:
        self._reader.num_pending_bytes -= len(self._body)


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body's object. Raises InvalidJson, also for NaN, lone surrogates, deep nesting and endless integers.

    A byte order mark is dropped: programs on Windows write it.
    """
    raw = raw.removeprefix(BOM_UTF8)
    begin_body()
    if len(raw) > INLINE_BYTES and takes_too_long(raw):
        raise InvalidJson(f"The body has more than this server reads, which is about {MOST_IN_WORDS}.")
    try:
        # A cache triples the time where no string repeats.
        value = from_json(raw, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        if not raw.strip():
            raise InvalidJson("The body is empty; it must be a JSON object.") from None
        raise InvalidJson(f"The body {_json_fault(str(error))}.") from None
    if not isinstance(value, dict):
        raise InvalidJson("The body must be a JSON object.")
    if len(value) > MAX_FIELDS:
        raise InvalidJson(f"The body has more than {MAX_FIELDS} fields, the most this server reads.")
    return value


def _json_fault(problem: str) -> str:
    """What is wrong with the body, of jiter's message, which quotes no input and ends with the place."""
    at = re.search(r" at line \d+ column \d+$", problem)
    reason = next((words for beginning, words in JSON_FAULTS.items() if problem.startswith(beginning)), "")
    return f"{reason or 'is not valid JSON'}{at[0] if at else ''}"


def _declared_length(headers: Mapping[str, str]) -> int | None:
    declared = headers.get("content-length")
    if declared is None:
        return None
    if not (declared.isascii() and declared.isdigit() and len(declared) < 19):
        raise IncompleteBody("Content-Length must be a number of bytes.")
    return int(declared)


def _too_large(limits: BodyLimits) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limits.max_bytes} bytes, the most this server reads.")


def _mismatch(declared: int, received: int, when: str = "") -> str:
    return f"Content-Length says {declared} bytes, {received} arrived{when}."


GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
PIECE_BYTES: Final = 128 * 2**10  # about 0.3 ms of work
# Of a piece: up to 2.5 ms of work, where each 11 bytes are a block with tables of its own.
INPUT_BYTES: Final = 16 * 2**10
# Bytes that the gzip may have more than what it holds: its header, and blocks that a client has flushed.
MOST_WITHOUT_CONTENT: Final = 64 * 2**10


def is_compressed(encoding: str) -> bool:
    """Whether a body with this Content-Encoding is gzip. Raises UnsupportedMediaType for an encoding that is not known."""
    if not encoding:
        return False
    name = encoding.strip().lower()
    if name not in ("", "identity", "gzip", "x-gzip"):
        raise UnsupportedMediaType("The body's Content-Encoding must be gzip, or none.")
    return name.endswith("gzip")


def gunzipped(raw: bytes | bytearray) -> Iterator[bytes]:
    """The plain bytes in pieces of at most PIECE_BYTES, each of at most INPUT_BYTES of `raw`: a small body of a huge one is
    refused before the huge one exists, and blocks without content yield nothing but take time.

    Raises InvalidJson for bytes that are not one whole gzip stream, or that hold almost nothing."""
    stream = zlib.decompressobj(GZIP_WINDOW)
    num_read = num_plain = 0
    while not stream.eof:
        if not (given := stream.unconsumed_tail):
            given = bytes(raw[num_read : num_read + INPUT_BYTES])
            num_read += len(given)
        try:
            piece = stream.decompress(given, PIECE_BYTES)
        except zlib.error:
            raise InvalidJson("The body is not valid gzip, as its Content-Encoding says.") from None
        num_plain += len(piece)
        if not piece and not given:
            raise InvalidJson("The body's gzip stream is cut short.")
        if num_read - len(stream.unconsumed_tail) > num_plain + MOST_WITHOUT_CONTENT:
            raise InvalidJson(
                f"The body's gzip stream has over {MOST_WITHOUT_CONTENT} bytes more than what it holds: send it plain."
            )
        yield piece
    if stream.unused_data or num_read < len(raw):
        raise InvalidJson("The body has bytes after the end of its gzip stream.")
