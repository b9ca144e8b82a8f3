"""The endpoint of the generating and scoring routes; a request is received, planned, submitted, answered, closed."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from deployments.engine.interface import Engine, Models
from deployments.http.choices import Choices, submitted
from deployments.http.disconnect import DisconnectWatch
from deployments.http.generation_kinds import GenerationKind
from deployments.http.limits import HttpLimits
from deployments.http.request_body import BodyReader
from deployments.http.request_id import MOVED_TIMEOUT_HEADER, TIMEOUT_HEADER, headers_of
from deployments.http.responses_api.stored import StoredResponses
from deployments.http.resume.kept_streams import KeptStreams
from deployments.http.resume.resumable import ResumableSerializer
from deployments.http.resume.resumption import Resumption, resumption
from deployments.http.sse import EventStream
from deployments.observe.metrics import Metrics
from deployments.observe.request_log import RequestRecord
from deployments.observe.tracing import Tracing
from deployments.openai.answers.answer import AnswerSerializer, CollectedChoice, WholeSerializer, run_in_slices
from deployments.openai.field_types import MAX_OWNER_CHARS
from deployments.openai.plan import Plan, engine_of
from deployments.openai.prompt_encoder import PromptEncoder
from llama_core.errors import CallersDeadlineExceeded, DeadlineExceeded, InvalidParameter, RequestCancelled
from llama_core.log_lines import LogSubject, log_subject

log = logging.getLogger(__name__)

PIECE_BYTES: Final = (
    256 * 2**10
)  # of an answer that is not streamed: the server buffers it for a client that does not read
# Where Serve sees `x-request-timeout-seconds` too (`serve_headers.py` hides it), Serve would end the request with its own
# text, and cut a stream off. This server's deadline is then earlier by a quarter of the limit, or by this time if that is less:
# Serve's timer begins in its proxy, to which the messages of a stream take some tenths of a second on a busy machine.
HEAD_START_S = 1.0


@dataclass(frozen=True, slots=True)
class GenerationEndpoint:
    """One generation route as an ASGI application."""

    kind: GenerationKind[Any]
    engine: Models
    metrics: Metrics
    limits: HttpLimits
    bodies: BodyReader
    encoder: PromptEncoder
    streams: KeptStreams
    tracing: Tracing | None = None
    log_prompts: bool = False
    stored: StoredResponses | None = None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return _GenerationRequest(self, Request(scope, receive), send).run()


class _GenerationRequest:
    _engine: Engine  # of the model, once that is known

    def __init__(self, endpoint: GenerationEndpoint, request: Request, send: Send) -> None:
        self._endpoint = endpoint
        self._request, self._send = request, send
        self._headers = headers_of(request.scope)
        state = request.scope["state"]
        self._owner: str = state.get("owner", "")
        trace = None
        if endpoint.tracing is not None:
            trace = endpoint.tracing.begin_http(endpoint.kind.path, state["request_id"], request.headers)
        if trace is not None:
            log_subject.set(LogSubject(state["request_id"], trace.trace_id))
        self._record = RequestRecord(endpoint.metrics, endpoint.kind.path, state["request_id"], self._owner, trace)
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._limit_s: float | None = None
        self._end_s: float | None = None
        self._raw = b""  # the body, where the answer is stored
        self._choices: Choices | None = None
        self._stream: EventStream | None = None
        self._resumption: Resumption | None = None
        # Its end is no failure of this server. The error itself would hold this request, and its body.
        self._was_cut = True
        self._sends_whole = False
        self._deadline: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        try:
            endpoint = self._endpoint
            self._resumption = resumption(self._headers, endpoint.streams, endpoint.kind.path, self._owner)
            if (limit_s := self._allowed_s()) is not None:
                # Earlier than the limit, so that Serve's own timer does not end the request first.
                head_start_s = min(HEAD_START_S, limit_s / 4) if TIMEOUT_HEADER in self._headers else 0.0
                self._limit_s, self._end_s = limit_s, self._began_s + limit_s - head_start_s
            async with self._in_time():
                plan = await self._plan()
            self._record.planned(plan)
            if endpoint.log_prompts:
                decode = self._engine.tokenizer.decode
                self._record.prompts_are([decode(prompt) for prompt in plan.request.prompts])
            async with self._in_time():
                serializer = await self._submit(plan)
            if self._end_s is not None and self._choices is not None:
                self._deadline = self._loop.call_at(self._end_s, self._choices.end, self._late())
            await self._answer(plan, serializer)
        except BaseException as error:
            self._was_cut = isinstance(error, RequestCancelled) or not isinstance(error, Exception)
            self._record.failed(error)
            has_answer = self._sends_whole or (self._stream is not None and self._stream.has_started)
            if not (has_answer and isinstance(error, RequestCancelled)):
                raise
        finally:
            self._close()

    @property
    def _submitted(self) -> Choices:
        assert self._choices is not None, "the request has been submitted"
        return self._choices

    def _allowed_s(self) -> float | None:
        """How long this request may take: as its header asks, and no longer than the server allows."""
        server_s = self._endpoint.limits.request_timeout_s
        given = self._headers.get(MOVED_TIMEOUT_HEADER, self._headers.get(TIMEOUT_HEADER))
        if given is None:
            return server_s
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InvalidParameter.of(TIMEOUT_HEADER, "must be a number of seconds greater than 0")
        return min(seconds, server_s or math.inf)

    def _late(self) -> DeadlineExceeded:
        message = f"The answer was not complete within {self._limit_s:g} s, the limit of this request."
        is_servers = self._limit_s == self._endpoint.limits.request_timeout_s
        return DeadlineExceeded(message) if is_servers else CallersDeadlineExceeded(message)

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raises DeadlineExceeded where the block runs beyond the limit."""
        try:
            async with asyncio.timeout_at(self._end_s) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._late() from None

    async def _plan(self) -> Plan:
        endpoint, resumption = self._endpoint, self._resumption
        async with endpoint.bodies.received(self._request) as raw:
            # After the body has arrived, or the connection could not be reused; before it is parsed.
            self._record.received()
            endpoint.engine.check_capacity(self._owner)
            if resumption is not None and (kept := resumption.find(raw)) is not None:
                self._engine, self._raw = kept.engine, kept.raw  # whose adapter may have been unloaded since
                return kept.plan
            if endpoint.stored is not None:
                raw = self._raw = await endpoint.stored.completed(raw, self._owner)
            body = await endpoint.bodies.parse(raw, endpoint.kind.body)
        name = getattr(body, "model", None)
        if endpoint.engine.asleep:
            async with DisconnectWatch(self._request.receive):
                await endpoint.engine.meet_model(name)
        self._engine = engine = engine_of(endpoint.engine, name)
        # The owner as of the plan, which does not exist yet.
        owner = self._owner or str(getattr(body, "user", None) or "")[:MAX_OWNER_CHARS]
        encoder = endpoint.encoder.of(owner, engine, None if resumption is None else resumption.began_s)
        plan = await endpoint.kind.plan(body, engine, encoder)
        if self._owner:
            request = plan.request
            plan = replace(plan, request=replace(request, terms=replace(request.terms, owner=self._owner)))
        return plan if resumption is None else resumption.repeatable(plan, self._raw)

    async def _submit(self, plan: Plan) -> WholeSerializer:
        """What writes the answer."""
        engine, is_timed = self._engine, self._record.is_traced
        resumption = self._resumption if plan.stream else None
        if resumption is None:
            self._choices = await submitted(engine, plan, is_timed=is_timed)
        else:
            place = resumption.place(plan)
            self._choices = await resumption.choices(engine, plan, place, is_timed=is_timed)
        streams = self._choices.streams
        self._record.submitted(streams)
        serializer = self._endpoint.kind.serializer(engine, plan, streams)
        if (stored := self._endpoint.stored) is not None:
            stored.keep_end_of(serializer, self._raw, self._owner)
        if resumption is None:
            return serializer
        # Plans of routes whose answers cannot be streamed never ask for it.
        return ResumableSerializer(cast(AnswerSerializer, serializer), streams, resumption.fingerprint, place)

    async def _answer(self, plan: Plan, serializer: WholeSerializer) -> None:
        async with DisconnectWatch(self._request.receive) as scope:
            if self._resumption is not None:
                self._resumption.reader.scope = scope
            if plan.stream:
                await self._event_stream(cast(AnswerSerializer, serializer)).run(self._send, scope)
                return
            body = await self._whole_answer(serializer)
            self._sends_whole = True
            await send_whole(body, self._send, self._endpoint.limits.send_timeout_s)
        self._record.succeeded()

    def _event_stream(self, serializer: AnswerSerializer) -> EventStream:
        limits, rest = self._endpoint.limits, None
        if isinstance(serializer, ResumableSerializer):
            rest = serializer.rest(self._submitted, limits.ping_s)
        self._stream = EventStream(self._submitted, serializer, self._record, limits, rest)
        return self._stream

    async def _whole_answer(self, serializer: WholeSerializer) -> bytes:
        choices = self._submitted
        collected = [CollectedChoice() for _ in choices.streams]
        while choices.num_open:
            await choices.wait()
            while (item := choices.take()) is not None:
                self._record.delta(item[1])
                collected[item[0]].add(item[1])
        return await run_in_slices(serializer.whole(collected))

    def _close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._resumption is not None:
            # Failed with an error, and not because nobody reads the answer.
            failed = self._stream is not None and (self._stream.has_failed or not self._was_cut)
            self._resumption.close(failed=failed)
        if self._choices is not None:
            self._choices.cancel()
        self._record.closed()


async def send_whole(body: bytes, send: Send, timeout_s: float) -> None:
    """Send `body`, which is JSON, in pieces.

    Raises RequestCancelled when the client reads nothing for `timeout_s`."""
    head = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    begin, end = 0, len(body)
    try:
        async with asyncio.timeout(timeout_s) as limit:
            await send({"type": "http.response.start", "status": 200, "headers": head})
            while True:
                piece, begin = body[begin : begin + PIECE_BYTES], begin + PIECE_BYTES
                await send({"type": "http.response.body", "body": piece, "more_body": begin < end})
                if begin >= end:
                    return
                limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
    except TimeoutError:
        log.warning("a client did not read its answer for %g s; it was cut off", timeout_s)
        raise RequestCancelled("the client did not read its answer") from None
