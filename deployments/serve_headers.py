"""What Serve may see of a request's headers. Runs in Serve's proxies and replicas, before Serve itself: `up.py` sees to it.

Serve 2.60 reads some headers of clients by itself, and answers by itself, in another shape than ours: one that is not UTF-8
with 500, and `x-request-timeout-seconds` with 408 or, in mid-stream, by cutting the answer off, each time before our own limit
can say so. A request's id, which it repeats, it takes as it comes.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.request_id import clean_request_id

TIMEOUT_HEADER = "x-request-timeout-seconds"
MOVED_TIMEOUT_HEADER = "x-llama-timeout-seconds"  # the same, out of Serve's sight

_TIMEOUT, _MOVED = TIMEOUT_HEADER.encode(), MOVED_TIMEOUT_HEADER.encode()
_REQUEST_ID = b"x-request-id"

Header = tuple[bytes, bytes]


def middlewares() -> list[Middleware]:
    return [Middleware(SafeForServe)]


class SafeForServe:
    """Hands on each request with headers that Serve can read, and its limit of time under a name that Serve does not know."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            scope = {**scope, "headers": [_safe(name, value) for name, value in scope["headers"]]}
        await self._app(scope, receive, send)


def _safe(name: bytes, value: bytes) -> Header:
    if name == _TIMEOUT:
        return _MOVED, value
    if name == _REQUEST_ID:
        return name, clean_request_id(value.decode("latin-1")).encode()
    if not value.isascii():
        try:
            value.decode()
        except UnicodeDecodeError:
            return name, value.decode("latin-1").encode()
    return name, value
