"""Server-sent events: a request's deltas as OpenAI's chunks, and the end of a stream that nobody reads.

An error before the first token is a proper HTTP status (see `request_id.py`); after that it is a chunk with `error`, and no
[DONE] follows, so no client can take half an answer for a whole one.
"""

import asyncio
import logging
from collections.abc import Iterator

from starlette.types import Send

from deployments.http.choices import Choices
from deployments.http.disconnect import DisconnectScope
from deployments.http.errors import as_llama_error, error_object
from deployments.http.proxy_coalescing import ProxyCoalescing
from deployments.http.request_log import RequestRecord
from deployments.http.responses import PING, ResponseSerializer, event
from llama_core.errors import LlamaError, RequestCancelled

log = logging.getLogger(__name__)

SLICE_BYTES = 256 * 2**10  # of events that are made at a stretch: about 5 ms for those with log-probabilities

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """Writes one request's events as they come; what is there at once, of one choice or several, leaves in one piece.

    This is the hot path, once a token of every stream: no task, timer or timeout here is one token's own.
    """

    def __init__(
        self,
        choices: Choices,
        serializer: ResponseSerializer,
        record: RequestRecord,
        *,
        ping_s: float,
        send_timeout_s: float,
        coalescing: ProxyCoalescing | None = None,
    ) -> None:
        """An idle stream says ": ping" so often; a client that reads nothing for `send_timeout_s` is cut off.

        coalescing: events wait for the next message as long as it says, all but the first.
        """
        self.has_started = False
        self._choices, self._serializer, self._record = choices, serializer, record
        self._ping_s, self._send_timeout_s = ping_s, send_timeout_s
        self._coalescing = coalescing
        self._is_over = False
        self._has_more = False  # after a slice, and what is left can be written at once
        self._events: Iterator[bytes] | None = None  # the rest of a delta with log-probabilities
        self._has_failed = False
        self._sending_since_s: float | None = None

    async def run(self, send: Send, scope: DisconnectScope) -> None:
        """To be run in the block that `scope` can cancel. Raises an error that comes before anything else."""
        if self._coalescing is None:
            await self._run(send, scope)
            return
        with self._coalescing.live_stream():
            await self._run(send, scope)

    async def _run(self, send: Send, scope: DisconnectScope) -> None:
        loop = asyncio.get_running_loop()
        body = self._take() if await self._choices.wait(self._ping_s) else PING
        self.has_started = True
        self._watch = loop.call_later(self._send_timeout_s, self._check_sending, loop, scope)
        try:
            self._sending_since_s = loop.time()
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
            while not self._is_over:
                if body:
                    self._sending_since_s = loop.time()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    self._sending_since_s = None
                    if not self._has_more and self._coalescing is not None and self._coalescing.interval_s:
                        await self._choices.wait_for_end(self._coalescing.interval_s)
                if self._has_more:
                    await asyncio.sleep(0)  # other tasks run between slices
                    body = self._take()
                else:
                    body = self._take() if await self._choices.wait(self._ping_s) else PING
            self._sending_since_s = loop.time()
            await send({"type": "http.response.body", "body": body, "more_body": False})
        finally:
            self._watch.cancel()
        if not self._has_failed:
            self._record.succeeded()

    def _take(self) -> bytes:
        """Events of what can be read now, about one slice at most, and the end of the stream."""
        chunks: list[bytes] = []
        try:
            self._has_more = self._fill(chunks)
            if not (self._has_more or self._choices.num_open):
                self._is_over = True
                chunks.append(self._serializer.end_of_stream())
        except Exception as error:
            if not self.has_started:
                raise
            self._is_over = self._has_failed = True
            self._record.failed(error)
            if not isinstance(error, LlamaError):
                log.exception("a stream failed, request %s", self._record.request_id)
            chunks.append(event(error_object(as_llama_error(error))))
        return b"".join(chunks)

    def _fill(self, chunks: list[bytes]) -> bool:
        """Whether a slice was full before everything was written."""
        num_bytes = 0
        while num_bytes < SLICE_BYTES:
            if self._events is not None:
                chunk = next(self._events, None)
                if chunk is None:
                    self._events = None
                    continue
            else:
                item = self._choices.take()
                if item is None:
                    return False
                self._record.delta(item[1])
                if self._serializer.has_logprobs:
                    self._events = self._serializer.chunks(*item)
                    continue
                chunk = self._serializer.chunk(*item)
            chunks.append(chunk)
            num_bytes += len(chunk)
        return True

    def _check_sending(self, loop: asyncio.AbstractEventLoop, scope: DisconnectScope) -> None:
        """One timer for all writes: it looks at the present one, and sleeps for what that one has left."""
        since_s = loop.time() if self._sending_since_s is None else self._sending_since_s
        left_s = since_s + self._send_timeout_s - loop.time()
        if left_s > 0:
            self._watch = loop.call_later(left_s, self._check_sending, loop, scope)
            return
        log.warning("a client did not read its stream for %g s; it was cut off", self._send_timeout_s)
        scope.cancel(RequestCancelled("the client did not read its stream"))
