"""A route of the application, with who may have its answer, and its entry of the API reference."""

import inspect
import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.openai.errors import RouteNotFound, route_path
from llama_core.errors import InvalidParameter

PREFIXES = ("v1", "api", "openai")  # of base URLs
# APIs of OpenAI and others that clients ask for, by the first word of their paths.
ABSENT = {
    "audio": "reads and makes no audio",
    "images": "makes no images",
    "moderations": "makes no moderations",
    "rerank": "reranks no documents",
}
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_NAMED_CHARS = 100
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")


class Access(Enum):
    """Who may have a route's answer, where keys are configured."""

    ANYONE = auto()  # load balancers and Kubernetes send no key, and any Host
    PAGE = auto()  # an API key; browsers ask for it as a password, and send it with the page's requests
    KEY = auto()  # an API key
    METRICS = auto()  # an admin key, or the only API key: counts of tokens tell what other keys send
    ADMIN = auto()  # an admin key


class ApiRoute(Route):
    """One method of one path. A route without a `tag` is left out of the API reference.

    text: summary and description, divided by an empty line; the endpoint's docstring unless given. body: its body's schema.
    answer: the type of a 200's content. statuses: of its errors, beside 401 and 403.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any] | ASGIApp,
        *,
        method: str = "GET",
        access: Access = Access.KEY,
        tag: str = "",
        text: str = "",
        body: type[BaseModel] | None = None,
        answer: type = str,
        statuses: Sequence[int] = (),
        media_type: str = "application/json",
    ) -> None:
        super().__init__(path, endpoint, methods=[method], include_in_schema=bool(tag))
        self.method, self.access, self.tag = method.lower(), access, tag
        summary, _, description = (text or inspect.getdoc(endpoint) or "").partition("\n\n")
        self.summary, self.description = summary.rstrip("."), description.replace("\n", " ")
        self.body, self.answer = body, answer
        self.statuses, self.media_type = statuses, media_type


class ApiRouter:
    """Finds the route of a request: by one lookup for a path without parameters, else by the patterns of the others."""

    def __init__(self, routes: Sequence[ApiRoute]) -> None:
        self._patterns = [route for route in routes if route.param_convertors]
        self._exact = {
            (method, route.path): route
            for route in routes
            if not route.param_convertors
            for method in route.methods or ()
        }
        self._words = {"", *PREFIXES, *(word for _, path in self._exact for word in path.split("/"))}
        self._methods: dict[str, list[str]] = {}
        for method, path in self._exact:
            self._methods.setdefault(path, []).append(method)

    def find(self, scope: Scope) -> tuple[Access, ASGIApp]:
        """What answers an HTTP request, and who may have the answer. Raises InvalidParameter for control characters in the
        path, which patterns, proxies and logs read differently.

        The route's own application: each token of a stream passes through every coroutine that awaits another.
        """
        if _CONTROLS.search(scope["path"]):
            raise InvalidParameter("The path has control characters.")
        path = route_path(scope)
        if (route := self._exact.get((scope["method"], path))) is not None:
            return route.access, route.app
        if path.rstrip("/") not in self._methods:  # /v1/models/ would be the model without a name
            matches = [(route, *route.matches(scope)) for route in self._patterns]
            for kind in (Match.FULL, Match.PARTIAL):
                for route, match, found in matches:
                    if match is kind:
                        scope.update(found)
                        return route.access, route.handle  # which refuses another method
        return Access.KEY, self._not_found

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:
        if methods := self._methods.get(route_path(scope)):
            raise HTTPException(405, headers={"Allow": ", ".join(sorted(methods))})
        if (first := next(iter(_words_of(scope)), "")) in ABSENT:
            raise RouteNotFound(f"This server {ABSENT[first]}; GET /docs lists its routes.")
        suggested = self._suggested(scope)
        meant = f" Did you mean {suggested}?" if suggested else ""
        # Not where the two differ by slashes at the end.
        if "/v1/" in suggested and suggested != scope.get("root_path", "") + route_path(scope).rstrip("/"):
            meant += " OpenAI's clients take a base URL that ends in /v1, once."
        raise RouteNotFound(f"There is no {self._named(scope)}; GET /docs lists them.{meant}")

    def _named(self, scope: Scope) -> str:
        """The route by method and path, if every word of them is one of our own. Never the client's text."""
        path = route_path(scope)
        is_ours = len(path) <= MAX_NAMED_CHARS and all(part in self._words for part in path.split("/"))
        if not (is_ours and scope["method"] in METHODS):
            return "such route"
        return f"route {scope['method']} {scope.get('root_path', '')}{path}"

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
