"""The HTTP application: OpenAI's routes, the tokenizer's, and those that operators watch.

Decides which route does what; reading bodies, planning, streaming and writing answers are modules of their own. Knows
the engine only by its seam, and nothing of Ray: Ray Serve, uvicorn and the tests all run what `build_http_app` returns.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api_keys import ApiKeys, Guard
from deployments.engine.interface import Delta, Engine, Readiness
from deployments.engine.metrics import CONTENT_TYPE, Metrics
from deployments.http.choices import Choices
from deployments.http.disconnect import while_connected
from deployments.http.errors import (
    InvalidJson,
    MethodNotAllowed,
    RouteNotFound,
    Unauthorized,
    as_llama_error,
    error_object,
    error_response,
    json_response,
)
from deployments.http.limiter import Turns
from deployments.http.logprobs import BOS_NAME, EOS_NAME
from deployments.http.openapi import body_docs, document, operation
from deployments.http.plan import Plan, check_model, encode_aside, encode_text, plan_chat, plan_completion
from deployments.http.playground import playground_response
from deployments.http.request_body import BodyLimits, BodyReader, parse_json, validate
from deployments.http.request_id import RequestScope
from deployments.http.request_log import RequestRecord
from deployments.http.responses import ChatReply, CompletionReply, Reply
from deployments.http.schemas import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from deployments.http.sse import EventStream
from deployments.serve_headers import MOVED_TIMEOUT_HEADER, TIMEOUT_HEADER
from llama_core.errors import DeadlineExceeded, EngineError, InvalidParameter, LlamaError, NotReady, RequestCancelled

BodyT = TypeVar("BodyT", bound=GenerationBody)

# Where Serve sees `x-request-timeout-seconds` too (`serve_headers.py` hides it), it would end the request by a text of its
# own, a stream by cutting it off.
HEAD_START_S = 0.1


@dataclass(frozen=True, slots=True)
class HttpLimits:
    body: BodyLimits = field(default_factory=BodyLimits)
    ping_s: float = 15.0  # an idle stream says ": ping" so often
    send_timeout_s: float = 30.0  # a client that reads nothing for so long is cut off
    request_timeout_s: float | None = None  # from a request's head to its answer's end; a client may ask for less


@dataclass(frozen=True, slots=True)
class GenerationRoute(Generic[BodyT]):
    """What tells completions from chat completions: the body, what it asks for, how the answer is written."""

    path: str
    summary: str
    description: str
    body: type[BodyT]
    plan: Callable[[BodyT, dict[str, Any], Engine], Awaitable[Plan]]
    reply: type[Reply]


COMPLETIONS = GenerationRoute(
    "/v1/completions",
    "Completions",
    "Continue each prompt. `max_tokens` is 16 unless given.",
    CompletionBody,
    plan_completion,
    CompletionReply,
)
CHAT = GenerationRoute(
    "/v1/chat/completions",
    "Chat Completions",
    "Answer a dialog: optional system message, then user and assistant in turn. May fill the context unless limited.",
    ChatBody,
    plan_chat,
    ChatReply,
)


def build_http_app(
    engine: Engine,
    metrics: Metrics,
    limits: HttpLimits | None = None,
    *,
    max_body_bytes: int | None = None,
    request_timeout_s: float | None = None,
    keys: ApiKeys | None = None,
    sends_request_id: bool = True,
) -> FastAPI:
    """An ASGI application that serves `engine`, which may still be loading: then requests are answered 503.

    sends_request_id: False in Ray Serve, which adds the X-Request-ID header itself.
    """
    limits = limits or HttpLimits()
    if max_body_bytes is not None:
        limits = replace(limits, body=replace(limits.body, max_bytes=max_body_bytes))
    if request_timeout_s is not None:
        limits = replace(limits, request_timeout_s=request_timeout_s)
    app = App(title="Llama on Ray", description="OpenAI's completions and chat completions.", version="1")
    guarded = partial(Guard, keys=keys or ApiKeys(), on_refused=_refusals(app, metrics))
    app.add_middleware(guarded)
    app.add_middleware(RequestScope, sends_id=sends_request_id)
    app.add_exception_handler(LlamaError, _on_llama_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    bodies = BodyReader(limits.body)
    for route in (COMPLETIONS, CHAT):
        endpoint: Generation[Any] = Generation(route, engine, metrics, limits, bodies)
        app.short_ways[route.path] = RequestScope(guarded(endpoint), sends_request_id)
        # For whoever reads the list of routes, and for requests that are no POST.
        app.router.routes.append(Route(route.path, endpoint, methods=["POST"]))
    _add_model_routes(app, engine, created=int(time.time()))
    _add_tokenizer_routes(app, engine, bodies)
    _add_operator_routes(app, engine, metrics)
    document(
        app, {route.path: operation(route.summary, route.description, route.body) for route in (COMPLETIONS, CHAT)}
    )
    return app


class App(FastAPI):
    """FastAPI, with a way past it for a POST to one of `short_ways`: a path and what answers there.

    A dozen layers of FastAPI's and Starlette's cost a request as much as all that is done for it here, and every token that
    is streamed passes through each of them.
    """

    def __init__(self, **about: str) -> None:
        super().__init__(**about)  # type: ignore[arg-type]
        self.short_ways: dict[str, ASGIApp] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        answer = self.short_ways.get(scope["path"].removeprefix(scope.get("root_path", ""))) if is_post else None
        await (answer or super().__call__)(scope, receive, send)


class Generation(Generic[BodyT]):
    """One of the two generation routes, streamed or not, as an ASGI application of its own."""

    def __init__(
        self, route: GenerationRoute[BodyT], engine: Engine, metrics: Metrics, limits: HttpLimits, bodies: BodyReader
    ) -> None:
        self.route = route
        self._engine, self._metrics, self._limits, self._bodies = engine, metrics, limits, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        record = RequestRecord(self._metrics, self.route.path, state["request_id"], owner=state.get("owner", ""))
        choices: Choices | None = None
        stream: EventStream | None = None
        deadline: asyncio.TimerHandle | None = None
        try:
            request, loop = Request(scope, receive), asyncio.get_running_loop()
            limit_s, began_s = self._limit_s(request), loop.time()
            end_s = None if limit_s is None else began_s + limit_s - min(HEAD_START_S, limit_s / 10)
            try:
                async with asyncio.timeout_at(end_s):
                    plan = await self._plan(request)
            except TimeoutError:
                if limit_s is None:
                    raise
                raise _late(limit_s) from None
            record.planned(plan)
            choices = Choices(self._engine, plan)
            if limit_s is not None and end_s is not None:
                deadline = loop.call_at(end_s, choices.end, _late(limit_s))
            reply = self.route.reply(self._engine, plan, choices.streams)
            async with while_connected(receive) as ending:
                if plan.stream:
                    limits = self._limits
                    stream = EventStream(
                        choices, reply, record, ping_s=limits.ping_s, send_timeout_s=limits.send_timeout_s
                    )
                    await stream.run(send, ending)
                    return
                answer = await _whole(choices, reply, record)
            await answer(scope, receive, send)
        except BaseException as error:
            record.failed(error)
            if not (isinstance(error, RequestCancelled) and stream is not None and stream.has_started):
                raise
        finally:
            if deadline is not None:
                deadline.cancel()
            if choices is not None:
                choices.cancel()
            record.closed()

    def _limit_s(self, request: Request) -> float | None:
        """How long this request may take: as its header asks, and no longer than the server allows."""
        given = request.headers.get(MOVED_TIMEOUT_HEADER, request.headers.get(TIMEOUT_HEADER))
        if given is None:
            return self._limits.request_timeout_s
        try:
            seconds = float(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise InvalidParameter(
                f"{TIMEOUT_HEADER}: must be a number of seconds greater than 0", param=TIMEOUT_HEADER
            )
        return min(seconds, self._limits.request_timeout_s or math.inf)

    async def _plan(self, request: Request) -> Plan:
        check_takes_requests(self._engine)
        body = await self._bodies.read(request)  # first, or the connection could not be used again
        key_owner = request.scope["state"].get("owner", "")
        self._engine.check_room(key_owner)
        raw = parse_json(body)
        plan = await self.route.plan(validate(self.route.body, raw), raw, self._engine)
        return replace(plan, owner=key_owner) if key_owner else plan


def _late(limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"The answer was not complete within {limit_s:g} s, the limit of this request.")


async def _whole(choices: Choices, reply: Reply, record: RequestRecord) -> Response:
    deltas: list[list[Delta]] = [[] for _ in choices.streams]
    while choices.num_open:
        await choices.wait()
        while (item := choices.take()) is not None:
            record.delta(item[1])
            deltas[item[0]].append(item[1])
    record.succeeded()
    return json_response(reply.whole(deltas))


def _refusals(app: App, metrics: Metrics) -> Callable[[Scope, Unauthorized], None]:
    """Counts and logs requests without a key as others. Paths that are no route's are "other": anybody may make them up."""

    def on_refused(scope: Scope, error: Unauthorized) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        known = any(getattr(route, "path", None) == path for route in app.router.routes)
        RequestRecord(metrics, path if known else "other", scope["state"]["request_id"]).failed(error)

    return on_refused


def check_takes_requests(engine: Engine) -> None:
    """Raises NotReady, which says why and when to come back."""
    readiness = engine.readiness()
    if not readiness.takes_requests:
        raise _not_ready(readiness)


def _not_ready(readiness: Readiness) -> NotReady:
    detail = f"The server is not ready ({readiness.phase}). {readiness.detail}".strip()
    return NotReady(detail, retry_after_s=readiness.retry_after_s)


def _add_model_routes(app: FastAPI, engine: Engine, created: int) -> None:
    def model() -> dict[str, object]:
        size = {"max_model_len": engine.max_seq_len}
        return {"id": engine.model_id, "object": "model", "created": created, "owned_by": "llama-on-ray", **size}

    @app.get("/v1/models", tags=["models"])
    async def models() -> Response:
        return json_response({"object": "list", "data": [model()]})

    @app.get("/v1/models/{model_id:path}", tags=["models"])
    async def one_model(model_id: str) -> Response:
        check_model(model_id, engine)
        return json_response(model())


def _add_tokenizer_routes(app: FastAPI, engine: Engine, bodies: BodyReader) -> None:
    turns = Turns(at_once=2, most_waiting=8)  # of threads that prompts need too, and a long text takes 50 MB meanwhile

    @app.post("/tokenize", openapi_extra=body_docs(TokenizeBody), tags=["tokenizer"])
    async def tokenize(request: Request) -> Response:
        """Ids of a text, with BOS unless `add_special_tokens` is false, or of a chat as its template writes it."""
        check_takes_requests(engine)
        body = validate(TokenizeBody, parse_json(await bodies.read(request)))
        check_model(body.model, engine)
        tokens = await encode_text(body, engine, turns)
        return json_response({"count": len(tokens), "max_model_len": engine.max_seq_len, "tokens": tokens})

    @app.post("/detokenize", openapi_extra=body_docs(DetokenizeBody), tags=["tokenizer"])
    async def detokenize(request: Request) -> Response:
        """Text of ids; control tokens have none."""
        check_takes_requests(engine)
        body = validate(DetokenizeBody, parse_json(await bodies.read(request)))
        check_model(body.model, engine)
        text = await encode_aside(len(body.tokens), lambda: engine.tokenizer.decode(body.tokens), turns)
        return json_response({"prompt": text})

    @app.get("/tokenizer_info", tags=["tokenizer"])
    async def tokenizer_info() -> Response:
        """Names of the control tokens. The chat template is not Jinja: send messages, or ask /tokenize."""
        check_takes_requests(engine)
        size = {"vocab_size": engine.tokenizer.n_words, "max_model_len": engine.max_seq_len}
        return json_response({"bos_token": BOS_NAME, "eos_token": EOS_NAME, "chat_template": None, **size})


def _add_operator_routes(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    @app.get("/health", tags=["operation"])
    async def health() -> Response:
        """Liveness: 503 when only a restart helps. Loading counts as alive; see /ready."""
        if engine.live():
            return json_response({"status": "ok"})
        cause = EngineError(engine.readiness().detail or "No step completes.")
        return json_response({"status": "dead", **error_object(cause)}, 503)

    @app.get("/ready", tags=["operation"])
    async def ready() -> Response:
        """Readiness: 503 with Retry-After while loading, recovering (requests are taken and wait), draining or failed."""
        readiness = engine.readiness()
        state = {"ready": readiness.ready, "phase": readiness.phase, "detail": readiness.detail}
        if readiness.ready:
            return json_response(state)
        error = _not_ready(readiness)
        retry = error_response(error).headers["Retry-After"]
        return json_response({**state, **error_object(error)}, 503, {"Retry-After": retry})

    @app.get("/metrics", tags=["operation"])
    async def prometheus() -> Response:
        """This replica's figures as Prometheus text; Ray's own metrics have them too."""
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    @app.get("/props", tags=["operation"])
    async def props() -> Response:
        """What is served, on what, and how full it is."""
        return json_response(engine.describe())

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        return playground_response()


async def _on_llama_error(_: Request, error: Exception) -> Response:
    return error_response(as_llama_error(error))


async def _on_http_exception(_: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or a route that has not this method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return error_response(RouteNotFound("There is no such route; GET /docs lists them."), headers)
    if error.status_code == 405:
        allowed = headers.get("allow", headers.get("Allow", ""))
        return error_response(MethodNotAllowed(f"This route does not take this method, only {allowed}."), headers)
    return error_response(InvalidJson("The request could not be read."), headers)
