"""The HTTP application: OpenAI's routes, the tokenizer's, and those that operators watch.

Decides which route does what; reading bodies, planning, streaming and writing answers are modules of their own. Knows
the engine only by its seam, and nothing of Ray: Ray Serve, uvicorn and the tests all run what `build_http_app` returns.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from deployments.bodies import BodyLimits, parse_json, read_body, validate
from deployments.choices import Choices, unless_disconnected
from deployments.engine import Delta, Engine
from deployments.logprobs import BOS_NAME, EOS_NAME
from deployments.metrics import CONTENT_TYPE, Metrics
from deployments.middleware import RequestScope
from deployments.openai_format import ChatReply, CompletionReply, Reply
from deployments.openapi import body_docs, document
from deployments.plan import Plan, check_model, encode_aside, encode_text, plan_chat, plan_completion
from deployments.playground import playground_response
from deployments.problems import (
    InvalidJson,
    MethodNotAllowed,
    RouteNotFound,
    as_llama_error,
    error_object,
    error_response,
    json_response,
)
from deployments.request_log import RequestRecord
from deployments.schemas import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from deployments.streaming import EventStream, events
from llama_core.errors import EngineError, LlamaError, NotReady

BodyT = TypeVar("BodyT", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    body: BodyLimits = field(default_factory=BodyLimits)
    ping_s: float = 15.0  # an idle stream says ": ping" so often
    send_timeout_s: float = 30.0  # a client that reads nothing for so long is cut off


@dataclass(frozen=True, slots=True)
class Route(Generic[BodyT]):
    """What tells completions from chat completions: the body, what it asks for, how the answer is written."""

    path: str
    body: type[BodyT]
    plan: Callable[[BodyT, dict[str, Any], Engine], Awaitable[Plan]]
    reply: type[Reply]


COMPLETIONS = Route("/v1/completions", CompletionBody, plan_completion, CompletionReply)
CHAT = Route("/v1/chat/completions", ChatBody, plan_chat, ChatReply)


def build_http_app(
    engine: Engine,
    metrics: Metrics,
    limits: HttpLimits | None = None,
    *,
    max_body_bytes: int | None = None,
    sends_request_id: bool = True,
) -> FastAPI:
    """An ASGI application that serves `engine`, which may still be loading: then requests are answered 503.

    sends_request_id: False in Ray Serve, which adds the X-Request-ID header itself.
    """
    limits = limits or HttpLimits()
    if max_body_bytes is not None:
        limits = replace(limits, body=replace(limits.body, max_bytes=max_body_bytes))
    app = FastAPI(title="Llama on Ray", description="OpenAI's completions and chat completions.", version="1")
    app.add_middleware(RequestScope, sends_id=sends_request_id)
    app.add_exception_handler(LlamaError, _on_llama_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    _add_generation_routes(app, Generator(engine, metrics, limits))
    _add_model_routes(app, engine, created=int(time.time()))
    _add_tokenizer_routes(app, engine, limits)
    _add_operator_routes(app, engine, metrics)
    document(app)
    return app


class Generator:
    """One path for both routes, streamed or not."""

    def __init__(self, engine: Engine, metrics: Metrics, limits: HttpLimits) -> None:
        self._engine, self._metrics, self._limits = engine, metrics, limits

    async def answer(self, request: Request, route: Route[BodyT]) -> Response:
        record = RequestRecord(self._metrics, route.path, request.state.request_id)
        choices: Choices | None = None
        try:
            check_ready(self._engine)
            raw = parse_json(await read_body(request, self._limits.body))
            plan = await route.plan(validate(route.body, raw), raw, self._engine)
            record.planned(plan)
            choices = Choices(self._engine, plan)
            return await unless_disconnected(request.receive, self._generate(choices, plan, route.reply, record))
        except BaseException as error:
            if choices is not None:  # also where a response was made that nobody will send
                choices.cancel()
            record.failed(error)
            raise

    async def _generate(self, choices: Choices, plan: Plan, kind: type[Reply], record: RequestRecord) -> Response:
        handed_over = False

        def close() -> None:
            choices.cancel()
            record.closed()

        try:
            choices.start()
            reply = kind(self._engine, plan, choices.streams)
            if plan.stream:
                await choices.first(self._limits.ping_s)
                handed_over = True
                body = events(choices, reply, record, self._limits.ping_s)
                return EventStream(body, close, self._limits.send_timeout_s)
            deltas: list[list[Delta]] = [[] for _ in choices.streams]
            while choices.num_open and (item := await choices.next()) is not None:
                record.delta(item[1])
                deltas[item[0]].append(item[1])
            record.succeeded()
            return json_response(reply.whole(deltas))
        finally:
            if not handed_over:
                close()


def check_ready(engine: Engine) -> None:
    """Raises NotReady, which says why and when to come back."""
    readiness = engine.readiness()
    if not readiness.ready:
        detail = f"The server is not ready ({readiness.phase}). {readiness.detail}".strip()
        raise NotReady(detail, retry_after_s=readiness.retry_after_s)


def _add_generation_routes(app: FastAPI, generator: Generator) -> None:
    @app.post(COMPLETIONS.path, openapi_extra=body_docs(CompletionBody), tags=["generation"])
    async def completions(request: Request) -> Response:
        """Continue each prompt. `max_tokens` is 16 unless given."""
        return await generator.answer(request, COMPLETIONS)

    @app.post(CHAT.path, openapi_extra=body_docs(ChatBody), tags=["generation"])
    async def chat_completions(request: Request) -> Response:
        """Answer a dialog: optional system message, then user and assistant in turn. May fill the context unless limited."""
        return await generator.answer(request, CHAT)


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


def _add_tokenizer_routes(app: FastAPI, engine: Engine, limits: HttpLimits) -> None:
    @app.post("/tokenize", openapi_extra=body_docs(TokenizeBody), tags=["tokenizer"])
    async def tokenize(request: Request) -> Response:
        """Ids of a text, with BOS unless `add_special_tokens` is false, or of a chat as its template writes it."""
        check_ready(engine)
        body = validate(TokenizeBody, parse_json(await read_body(request, limits.body)))
        check_model(body.model, engine)
        tokens = await encode_text(body, engine)
        return json_response({"count": len(tokens), "max_model_len": engine.max_seq_len, "tokens": tokens})

    @app.post("/detokenize", openapi_extra=body_docs(DetokenizeBody), tags=["tokenizer"])
    async def detokenize(request: Request) -> Response:
        """Text of ids; control tokens have none."""
        check_ready(engine)
        body = validate(DetokenizeBody, parse_json(await read_body(request, limits.body)))
        check_model(body.model, engine)
        text = await encode_aside(len(body.tokens), lambda: engine.tokenizer.decode(body.tokens))
        return json_response({"prompt": text})

    @app.get("/tokenizer_info", tags=["tokenizer"])
    async def tokenizer_info() -> Response:
        """Names of the control tokens. The chat template is not Jinja: send messages, or ask /tokenize."""
        check_ready(engine)
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
        """Readiness: 503 with Retry-After while loading, draining or failed."""
        readiness = engine.readiness()
        state = {"ready": readiness.ready, "phase": readiness.phase, "detail": readiness.detail}
        try:
            check_ready(engine)
        except NotReady as error:
            retry = error_response(error).headers["Retry-After"]
            return json_response({**state, **error_object(error)}, 503, {"Retry-After": retry})
        return json_response(state)

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
