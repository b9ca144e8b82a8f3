"""All routes but generation: models, tokenizer, health, metrics and state, and the two pages."""

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from typing import Any, Self

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from deployments.engine.interface import Engine, EngineState, Models
from deployments.http.messages_api.schemas import CountTokensBody
from deployments.http.pages import API_REFERENCE, CHAT, page_response
from deployments.http.request_body import BodyReader
from deployments.http.routing import Access, ApiRoute
from deployments.observe.metrics import CONTENT_TYPE, Metrics
from deployments.openai.answers import schemas as answer_schemas
from deployments.openai.dialog_fields import DialogOptions, Messages
from deployments.openai.errors import error_object, json_response, retry_after_s
from deployments.openai.field_types import MAX_TEXT_BYTES, Body, Flag, Ids
from deployments.openai.plan import engine_of
from deployments.openai.prompt_encoder import PromptEncoder
from deployments.openai.tool_fields import Tools
from llama_core.errors import EngineError, InvalidParameter


class TokenizeBody(DialogOptions):
    """Either a text, or the messages of a chat, which are tokenized by the chat template."""

    model: str | None = None
    prompt: str | None = Field(None, max_length=MAX_TEXT_BYTES)
    messages: Messages = Field(default_factory=list)
    tools: Tools = Field((), description="Functions that the prompt offers beside the messages.")
    add_special_tokens: Flag = Field(None, description="Default true: BOS first.")
    parse_special: Flag = Field(None, description="true: names of control tokens in the prompt become those tokens.")
    return_token_strs: Flag = Field(None, description="true: the answer has the name of each token.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise InvalidParameter.of("prompt", "send either prompt or messages")
        if self.tools and not self.messages:
            raise InvalidParameter.of("tools", "needs messages, beside which the prompt offers them")
        if self.prompt is not None and len(self.prompt.encode()) > MAX_TEXT_BYTES:
            raise InvalidParameter.of("prompt", f"must have at most {MAX_TEXT_BYTES} bytes of UTF-8")
        return self


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Ids = Field(max_length=2**20)
    skip_special_tokens: Flag = Field(None, description="false: the text has the names of control tokens.")


# Of GET /props, what tells one key of others' requests.
OF_OTHERS = ("blocks_used", "prefix_cache_hit_tokens", "draft_tokens", "draft_tokens_accepted", "streams")
BODY_STATUSES = (400, 404, 408, 413, 415, 429, 503)  # of the errors of a route that reads a body


def check_takes_requests(engine: Models) -> None:
    """Raises NotReady while the engine takes no requests."""
    readiness = engine.readiness()
    if not readiness.takes_requests:
        raise readiness.not_ready()


def model_routes(engine: Models) -> list[ApiRoute]:
    """OpenAI's and Anthropic's clients read the same objects: no field means one thing here and another there."""
    created = int(time.time())
    created_at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")

    def described(name: str, model: Engine | None) -> dict[str, object]:
        """model: None for one that this process has not seen awake."""
        parent, max_seq_len = (None, None) if model is None else (model.parent, model.max_seq_len)
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "llama-on-ray",
            "root": name,  # vLLM's benchmark reads it; a path would tell clients about the machine
            "parent": parent,
            "max_model_len": max_seq_len,
            "status": "sleeping" if (parent or name) in engine.asleep else "ready",
            # Anthropic's:
            "type": "model",
            "display_name": name,
            "created_at": created_at,
            "lifecycle": "active",
            "max_input_tokens": max_seq_len,
            "max_tokens": max_seq_len,
        }

    async def models(_: Request) -> Response:
        """Models.

        The models that are served.
        """
        found: dict[str, Engine | None] = {**engine.models}
        found |= dict.fromkeys(sorted(engine.asleep - found.keys()))
        names: list[str | None] = [*found] or [None]
        anthropics = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": [described(*each) for each in found.items()], **anthropics})

    async def one_model(request: Request) -> Response:
        """Model.

        404 for another name.
        """
        name = request.path_params["model_id"]
        return json_response(
            described(name, None if name in engine.asleep - engine.models.keys() else engine_of(engine, name))
        )

    route = partial(ApiRoute, tag="models")
    return [
        route("/v1/models", models, answer=answer_schemas.ModelList),
        route("/v1/models/{model_id:path}", one_model, answer=answer_schemas.Model, statuses=(404,)),
    ]


async def count_tokens(body: CountTokensBody, _: Engine, encoder: PromptEncoder) -> object:
    """Count tokens.

    Tokens of the prompt that a body of /v1/messages makes, tools included.
    """
    return {"input_tokens": len(await body.chat.prompt(encoder))}


async def tokenize(body: TokenizeBody, model: Engine, encoder: PromptEncoder) -> object:
    """Tokenize.

    Ids of a text, with BOS unless `add_special_tokens` is false, or of a chat as its template writes it.
    """
    if body.prompt is None:
        tokens = await encoder.dialog(body.messages, replace(body.chat_options, tools=body.tools))
    else:
        bos = body.add_special_tokens is not False
        tokens = await encoder.text(body.prompt, bos=bos, parse_special=body.parse_special)
    names = await encoder.names(tokens) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": model.max_seq_len, "tokens": tokens, "token_strs": names}


async def detokenize(body: DetokenizeBody, _: Engine, encoder: PromptEncoder) -> object:
    """Detokenize.

    Text of ids; control tokens have none unless `skip_special_tokens` is false.
    """
    return {"prompt": await encoder.decode(body.tokens, skip_special_tokens=body.skip_special_tokens is not False)}


def text_routes(engine: Models, bodies: BodyReader, encoder: PromptEncoder) -> list[ApiRoute]:
    """Those that count tokens, and then those of the tokenizer."""

    def route(path: str, reply: Callable[..., Awaitable[object]], kind: type[Body], answer: type, tag: str) -> ApiRoute:
        async def endpoint(request: Request) -> Response:
            check_takes_requests(engine)
            async with bodies.received(request) as raw:
                body: Any = await bodies.parse(raw, kind)
            await engine.meet_model(body.model)
            model = engine_of(engine, body.model)
            return json_response(await reply(body, model, encoder.of("", model)))

        endpoint.__doc__ = reply.__doc__
        return ApiRoute(path, endpoint, method="POST", tag=tag, body=kind, answer=answer, statuses=BODY_STATUSES)

    async def tokenizer_info(_: Request) -> Response:
        """Tokenizer.

        Names of the control tokens, and the chat template; null for a model without one.
        """
        check_takes_requests(engine)
        model = engine_of(engine, None)
        tokenizer = model.tokenizer
        return json_response(
            {
                "bos_token": None if tokenizer.bos_id is None else tokenizer.token_name(tokenizer.bos_id),
                "eos_token": tokenizer.token_name(tokenizer.eos_id),
                "chat_template": model.chat_format.client_template,
                "vocab_size": tokenizer.n_words,
                "max_model_len": model.max_seq_len,
            }
        )

    counts, info = answer_schemas.InputTokens, answer_schemas.TokenizerInfo
    return [
        route("/v1/messages/count_tokens", count_tokens, CountTokensBody, counts, "generation"),
        route("/tokenize", tokenize, TokenizeBody, answer_schemas.TokenizedText, "tokenizer"),
        route("/detokenize", detokenize, DetokenizeBody, answer_schemas.DetokenizedText, "tokenizer"),
        ApiRoute("/tokenizer_info", tokenizer_info, tag="tokenizer", answer=info, statuses=(503,)),
    ]


def probe_routes(engine: Models) -> list[ApiRoute]:
    """Whether the process lives, and whether it takes requests."""

    async def health(request: Request) -> Response:
        """Liveness.

        503 when only a restart helps. A server that loads is alive; see /ready.
        """
        if engine.live():
            return json_response({"status": "ok"})
        detail = engine.readiness().detail if request.state.is_trusted else ""
        cause = EngineError(detail or "The engine makes no progress.")
        return json_response({"status": "dead", **error_object(cause)}, 503)

    async def ready(request: Request) -> Response:
        """Readiness.

        503 with Retry-After while the server loads, recovers (requests are taken and wait), drains or has failed.
        """
        readiness = engine.readiness()
        if not request.state.is_trusted:
            readiness = replace(readiness, detail="")
        state = {"ready": readiness.ready, "phase": readiness.phase, "detail": readiness.detail}
        if readiness.ready:
            return json_response(state)
        error = readiness.not_ready()
        retry = str(retry_after_s(error))
        return json_response({**state, **error_object(error)}, 503, {"Retry-After": retry})

    probe = partial(ApiRoute, access=Access.ANYONE, tag="operation", statuses=(503,))
    liveness = partial(probe, endpoint=health, answer=answer_schemas.Health)
    as_health = "Liveness.\n\nThe same as /health, by the name that SageMaker asks for."
    return [
        liveness("/health"),
        liveness("/ping", text=as_health),
        liveness("/ping", method="POST", text=as_health),
        probe("/ready", ready, answer=answer_schemas.ServerReadiness),
    ]


def state_routes(engine: Models, metrics: Metrics) -> list[ApiRoute]:
    """Load, version, metrics, and what is served."""
    replica = {"X-Replica": secrets.token_hex(8)}  # by which a reader of several replicas' answers tells them apart

    async def load(_: Request) -> Response:
        """Load.

        Requests that run or wait in this replica.
        """
        state = engine.describe()
        return json_response({"server_load": state.requests_running + state.requests_waiting})

    async def version(_: Request) -> Response:
        """Version.

        Of the server.
        """
        try:
            return json_response({"version": metadata.version("llama-on-ray")})
        except metadata.PackageNotFoundError:  # run from a folder without an installation
            return json_response({"version": "unknown"})

    async def prometheus(_: Request) -> Response:
        """Metrics.

        This replica's metrics as Prometheus text; Ray's own metrics have them too. Needs an admin key where there are several
        API keys.
        """
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE, **replica})

    async def props(request: Request) -> Response:
        """Properties.

        Model, ranks, limits and load. Where there are several API keys, only an admin key gets counts of tokens and blocks.
        """
        state = engine.describe()
        if not request.state.reads_metrics:
            names = (field.name for field in fields(state) if field.name not in OF_OTHERS)
            return json_response({name: getattr(state, name) for name in names}, headers=replica)
        return json_response(state, headers=replica)

    route = partial(ApiRoute, tag="operation")
    return [
        route("/load", load, answer=answer_schemas.ServerLoad),
        route("/version", version, answer=answer_schemas.Version),
        route("/metrics", prometheus, access=Access.METRICS, media_type="text/plain"),
        route("/props", props, answer=EngineState),
    ]


def page_routes() -> list[ApiRoute]:
    async def chat(_: Request) -> Response:
        return page_response(CHAT)

    async def api_reference(_: Request) -> Response:
        return page_response(API_REFERENCE)

    return [ApiRoute("/", chat, access=Access.PAGE), ApiRoute("/docs", api_reference, access=Access.PAGE)]
