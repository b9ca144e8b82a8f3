"""A route of the application, with its entry of the API reference."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.openai.errors import RouteNotFound, route_not_found

PREFIXES = ("v1", "api", "openai")  # of base URLs
# APIs of OpenAI and others that clients ask for, by the first word of their paths.
ABSENT = {
    "audio": "reads and makes no audio",
    "embeddings": "makes no embeddings",
    "images": "makes no images",
    "moderations": "makes no moderations",
    "rerank": "reranks no documents",
}
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_NAMED_CHARS = 100


class ApiRoute(Route):
    """One method of one path. A route without a `tag` is left out of the API reference.

    body: its body's schema. answer: the type of a 200's content. statuses: of its errors, beside 401 and 403.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any] | ASGIApp,
        *,
        method: str = "GET",
        tag: str = "",
        summary: str = "",
        description: str = "",
        body: type[BaseModel] | None = None,
        answer: type = str,
        statuses: Sequence[int] = (),
        media_type: str = "application/json",
    ) -> None:
        super().__init__(path, endpoint, methods=[method], include_in_schema=bool(tag))
        self.method = method.lower()
        self.tag = tag
        self.summary = summary
        self.description = description
        self.body = body
        self.answer = answer
        self.statuses = statuses
        self.media_type = media_type


def route_path(scope: Scope) -> str:
    """The path of a request without the prefix under which the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class ApiRouter:
    """Finds the route of a request: by one lookup for a path without parameters, else by Starlette's router.

    Calls return the route's own coroutine: each token of a stream passes through every coroutine that awaits another.
    """

    def __init__(self, routes: Sequence[ApiRoute]) -> None:
        # A redirect would be built from the request's Host header.
        self._router = Router(list(routes), redirect_slashes=False, default=self._not_found)
        self._exact = {
            (method, route.path): route.app
            for route in routes
            if not route.param_convertors
            for method in route.methods or ()
        }
        self._words = {"", *PREFIXES, *(word for _, path in self._exact for word in path.split("/"))}
        self._methods: dict[str, list[str]] = {}
        for method, path in self._exact:
            self._methods.setdefault(path, []).append(method)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self._exact.get((scope["method"], route_path(scope))) if scope["type"] == "http" else None
        return (app or self._other)(scope, receive, send)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A path with parameters, and whatever no route takes."""
        if scope["type"] == "http":
            path = route_path(scope)
            if methods := self._methods.get(path):
                # Starlette would name the methods of the path's first route alone.
                raise HTTPException(405, headers={"Allow": ", ".join(sorted(methods))})
            if path.rstrip("/") in self._methods:  # /v1/models/ would be the model without a name
                await self._not_found(scope, receive, send)
        await self._router(scope, receive, send)

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router.not_found(scope, receive, send)
            return
        if (first := next(iter(_words_of(scope)), "")) in ABSENT:
            raise RouteNotFound(f"This server {ABSENT[first]}; GET /docs lists its routes.")
        suggested = self._suggested(scope)
        has_wrong_base = suggested != scope.get("root_path", "") + route_path(scope).rstrip("/")
        raise route_not_found(suggested, self._named(scope), has_wrong_base=has_wrong_base)

    def _named(self, scope: Scope) -> str:
        """The method and path of a request, if every word of them is one of our own; else "". Never the client's text."""
        path = route_path(scope)
        is_ours = len(path) <= MAX_NAMED_CHARS and all(part in self._words for part in path.split("/"))
        return f"{scope['method']} {scope.get('root_path', '')}{path}" if is_ours and scope["method"] in METHODS else ""

    def _suggested(self, scope: Scope) -> str:
        """The path that was probably meant by an unknown path; "" if there is none. Never the client's text.

        A wrong base URL lacks /v1, has it twice, or has a second slash.
        """
        parts = _words_of(scope)
        paths = {path for _, path in self._exact}
        tails = ("/v1/" + "/".join(parts), "/" + "/".join(parts))
        found = next((path for path in tails if parts and path in paths), "")
        return scope.get("root_path", "") + found if found else ""


def _words_of(scope: Scope) -> list[str]:
    """The words of the path after those of a base URL."""
    parts = [part for part in route_path(scope).split("/") if part]
    while parts and parts[0] in PREFIXES:
        parts.pop(0)
    return parts
