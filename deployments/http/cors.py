"""Lets web pages of configured origins call the server: the answers to preflight requests, and the headers that browsers check.

No cookies are allowed: a page sends an API key itself, or the server has none.
"""

from collections.abc import Awaitable, Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ANY_ORIGIN = "*"
METHODS = "GET, HEAD, POST, OPTIONS"
EXPOSED = "X-Request-ID, Retry-After, x-should-retry"
MAX_AGE_S = 600
_MAX_REQUEST_HEADERS = 4096  # characters of the list of header names that a preflight asks for


class Cors:
    """Adds CORS headers to answers for allowed origins, and answers their preflight requests, which carry no API key.

    Answers for other origins have no CORS headers, so browsers keep them from the page.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        """origins: as browsers send them, "https://chat.example.com:8443", or "*" for all."""
        self._app = app
        self._origins = frozenset(origin.lower() for origin in origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or not self._allows(origin):
            return self._app(scope, receive, send)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            return self._preflight(origin, headers)(scope, receive, send)
        return self._app(scope, receive, self._adding(origin, send))

    def _allows(self, origin: str) -> bool:
        return ANY_ORIGIN in self._origins or origin.lower() in self._origins

    def _preflight(self, origin: str, headers: Headers) -> Response:
        """Permits every header that the page asks for: SDKs send several of their own."""
        asked = headers.get("access-control-request-headers", "")[:_MAX_REQUEST_HEADERS]
        answer = {
            "Access-Control-Allow-Methods": METHODS,
            "Access-Control-Allow-Headers": asked or "Content-Type, Authorization",
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }
        if headers.get("access-control-request-private-network") == "true":
            answer["Access-Control-Allow-Private-Network"] = "true"
        response = Response(status_code=204, headers=answer)
        self._allow(response.headers, origin)
        return response

    def _adding(self, origin: str, send: Send) -> Send:
        async def send_allowed(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                self._allow(added, origin)
                added["Access-Control-Expose-Headers"] = EXPOSED
            await send(message)

        return send_allowed

    def _allow(self, headers: MutableHeaders, origin: str) -> None:
        if ANY_ORIGIN in self._origins:
            headers["Access-Control-Allow-Origin"] = ANY_ORIGIN
        else:
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
