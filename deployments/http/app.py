"""The HTTP application: assembles routes, API keys and errors into what Ray Serve, uvicorn and the tests run.

Knows the engine only by its interface, and nothing of Ray.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api_keys import ApiKeys
from deployments.engine.interface import Models
from deployments.http.adapter_routes import Loader, adapter_routes
from deployments.http.auth import AccessGuard, AllowedHosts
from deployments.http.generation import GenerationEndpoint
from deployments.http.generation_kinds import CHAT, GENERATING, RESPONSES, SCORING, GenerationKind
from deployments.http.limits import HttpLimits
from deployments.http.openapi import openapi_document
from deployments.http.request_body import BodyReader
from deployments.http.request_id import RequestScope
from deployments.http.responses_api.stored import AskOthers, StoredResponses
from deployments.http.resume.kept_streams import KeptStreams
from deployments.http.routes import BODY_STATUSES, model_routes, page_routes, probe_routes, state_routes, text_routes
from deployments.http.routing import ApiRoute, ApiRouter
from deployments.observe.metrics import Metrics
from deployments.observe.request_log import RequestRecord
from deployments.observe.tracing import Tracing
from deployments.openai.errors import json_response, route_path
from deployments.openai.prompt_encoder import PromptEncoder
from llama_core.errors import LlamaError


class HttpApp:
    """An ASGI application. `routes` in the order in which they are tried; `openapi()` is GET /openapi.json's document."""

    def __init__(self, routes: list[ApiRoute], stack: ASGIApp, stored: StoredResponses) -> None:
        self.routes, self.stored = routes, stored
        self._stack = stack
        self._document: dict[str, Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # so that the router raises for an unknown route or method, and RequestScope answers
        await self._stack(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self._document is None:
            self._document = openapi_document(self.routes)
        return self._document


async def _openapi_json(request: Request) -> Response:
    """The paths follow `servers`: the prefix below which Serve mounts the application."""
    prefix = request.scope.get("root_path", "")
    servers = {"servers": [{"url": prefix}]} if prefix else {}
    return json_response({**request.app.openapi(), **servers})


def build_http_app(
    engine: Models,
    metrics: Metrics,
    limits: HttpLimits | None = None,
    *,
    keys: ApiKeys | None = None,
    admin_keys: ApiKeys | None = None,
    loader: Loader | None = None,
    allowed_hosts: Iterable[str] = (),
    cors_origins: Iterable[str] = (),
    sends_request_id: bool = True,
    tracing: Tracing | None = None,
    log_prompts: bool = False,
    ask_others: AskOthers | None = None,
) -> HttpApp:
    """An ASGI application that serves `engine`. While the engine loads, requests are answered 503.

    loader: of adapters, for requests with one of `admin_keys`.
    allowed_hosts: names that a Host header may have, beside addresses and localhost, where `keys` has none.
    cors_origins: origins of web pages that may call the server; none by default.
    sends_request_id: False in Ray Serve, which adds the X-Request-ID header itself. tracing: where traces are exported.
    log_prompts: in the request log. ask_others: the other replicas for answers that this one does not keep.
    """
    limits = limits or HttpLimits()
    streams = KeptStreams(limits.keep, metrics)
    bodies, encoder = BodyReader(limits.body), PromptEncoder(limits.text)
    stored = StoredResponses(streams, bodies, ask_others)
    plain = GenerationEndpoint(CHAT, engine, metrics, limits, bodies, encoder, streams, tracing, log_prompts)

    def endpoint(kind: GenerationKind[Any]) -> ApiRoute:
        return ApiRoute(
            kind.path,
            replace(plain, kind=kind, stored=stored if kind is RESPONSES else None),
            method="POST",
            tag=kind.tag,
            text=kind.text,
            body=kind.body,
            answer=kind.answer,
            statuses=(*BODY_STATUSES, *((409, 422) if kind in GENERATING else ()), 500, 504),
        )

    count_tokens, *of_tokenizer = text_routes(engine, bodies, encoder)
    routes = [
        *map(endpoint, GENERATING),
        count_tokens,
        *map(endpoint, SCORING),
        *model_routes(engine),
        *(adapter_routes(loader, bodies) if loader is not None else ()),
        *of_tokenizer,
        *probe_routes(engine),
        *state_routes(engine, metrics),
        *page_routes(),
    ]
    paths = frozenset(route.path for route in routes)
    routes.append(ApiRoute("/openapi.json", _openapi_json))

    def on_refused(scope: Scope, error: LlamaError) -> None:
        """Counts and logs a refused request. Unknown paths count as "other", because clients can invent any number of them."""
        path = route_path(scope)
        RequestRecord(metrics, path if path in paths else "other", scope["state"]["request_id"]).failed(error)

    hosts = AllowedHosts(allowed_hosts)
    guard = AccessGuard(ApiRouter(routes), keys or ApiKeys(), admin_keys or ApiKeys(), hosts, on_refused)
    stack: ASGIApp = RequestScope(guard, sends_request_id)
    if origins := tuple(cors_origins):
        # Outside of the guard: a browser's preflight has no API key, and a page may read why it was refused.
        stack = CORSMiddleware(
            stack,
            allow_origins=origins,
            allow_methods=("GET", "HEAD", "POST", "OPTIONS"),
            allow_headers=("*",),  # SDKs send several of their own
            allow_private_network=True,
            expose_headers=("X-Request-ID", "Retry-After", "x-should-retry"),
        )
    return HttpApp(routes, stack, stored)
