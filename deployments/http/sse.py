"""Server-sent events: a request's deltas as its serializer writes them, and the end of a stream whose client does not read.

An error before the first event has its own HTTP status (see `request_id.py`); a later error is the
serializer's last event, and no [DONE] follows, so clients can distinguish a partial answer from a whole one.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator

from starlette.types import Send

from deployments.http.choices import Choices
from deployments.http.disconnect import DisconnectScope
from deployments.http.limits import HttpLimits
from deployments.observe.request_log import RequestRecord
from deployments.openai.answers.answer import AnswerSerializer
from deployments.openai.errors import as_llama_error
from llama_core.errors import LlamaError, RequestCancelled
from llama_core.log_lines import where

log = logging.getLogger(__name__)

SLICE_BYTES = 256 * 2**10  # of events in one slice: about 5 ms for those with log-probabilities

EVENT_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class EventStream:
    """Writes one request's events. Events that are ready at the same time, of one choice or several, are one message.

    This is the hot path, once a token of every stream: no token has a task, timer or timeout of its own.
    """

    def __init__(
        self,
        choices: Choices,
        serializer: AnswerSerializer,
        record: RequestRecord,
        limits: HttpLimits,
        rest: AsyncIterator[bytes] | None = None,
    ) -> None:
        """An idle stream sends a ping every `ping_s`; a client that reads nothing for `send_timeout_s` is disconnected. rest:
        events, or b"", to be sent before those of the choices."""
        self.has_started = self.has_failed = False
        self._choices, self._serializer, self._record = choices, serializer, record
        self._ping_s, self._send_timeout_s = limits.ping_s, limits.send_timeout_s
        self._is_over = False
        self._has_more = False  # the last slice was full: the next one is written without waiting
        self._rest = rest
        self._events: Iterator[bytes] | None = None  # the rest of a delta with log-probabilities
        self._sending_since_s: float | None = None
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None

    async def run(self, send: Send, scope: DisconnectScope) -> None:
        """Run it in the block that `scope` can cancel. Raises an error that occurs before the first event."""
        body = self._serializer.opening()
        try:
            while True:
                while not (body or self._is_over):
                    if self._has_more or self._rest is not None:
                        body = await self._next_slice()
                    else:
                        body = self._take() if await self._choices.wait(self._ping_s) else self._serializer.ping
                if not self.has_started:
                    self.has_started = True
                    self._record.streaming()
                    self._watch = self._loop.call_later(self._send_timeout_s, self._check_sending, scope)
                    self._sending_since_s = self._loop.time()
                    await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_STREAM_HEADERS)})
                self._sending_since_s = self._loop.time()
                await send({"type": "http.response.body", "body": body, "more_body": not self._is_over})
                if self._is_over:
                    break
                self._sending_since_s, body = None, b""
        finally:
            if self._watch is not None:
                self._watch.cancel()
        if not self.has_failed:
            self._record.succeeded()

    async def _next_slice(self) -> bytes:
        """What is to be sent before the choices' own events, or what is left of those that have been read."""
        if self._rest is not None:
            try:
                if (body := await anext(self._rest, None)) is not None:
                    return body
            except Exception as error:
                if not self.has_started:
                    raise
                return self._failed(error)
            self._rest = None
        await asyncio.sleep(0)  # other tasks run between slices
        return self._take()

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
            chunks.append(self._failed(error))
        return b"".join(chunks)

    def _failed(self, error: Exception) -> bytes:
        """The stream's last event. An error before its first is raised where it was caught: no frame may hold both."""
        self._is_over = self.has_failed = True
        self._record.failed(error)
        if not isinstance(error, LlamaError):
            log.error("a stream failed, request %s\n%s", self._record.request_id, where(error))
        return self._serializer.failure(as_llama_error(error), self._record.request_id)

    def _fill(self, chunks: list[bytes]) -> bool:
        """Whether a slice was full before everything was written."""
        num_bytes = 0
        while num_bytes < SLICE_BYTES:
            if self._events is not None:
                if (further := next(self._events, None)) is None:
                    self._events = None
                    continue
                chunk = further
            else:
                item = self._choices.take()
                if item is None:
                    return False
                self._record.delta(item[1])
                written = self._serializer.chunk(*item)
                if not isinstance(written, bytes):
                    self._events = written
                    continue
                chunk = written
            chunks.append(chunk)
            if self._events is None and not self._choices.ready:  # as with most tokens
                return False
            num_bytes += len(chunk)
        return True

    def _check_sending(self, scope: DisconnectScope) -> None:
        """One timer for all writes: it checks the current write and is set to that write's remaining time."""
        since_s = self._loop.time() if self._sending_since_s is None else self._sending_since_s
        left_s = since_s + self._send_timeout_s - self._loop.time()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._check_sending, scope)
            return
        log.warning("a client did not read its stream for %g s and was disconnected", self._send_timeout_s)
        scope.cancel(RequestCancelled("the client did not read its stream"))
