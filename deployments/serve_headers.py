"""Rewrites request headers on which Serve itself would act. Runs in Serve's proxies and replicas, before Serve.

Serve 2.60 reads some request headers and answers in a shape of its own: a header that is not UTF-8 with a 500, and
`x-request-timeout-seconds` with a 408 or, in the middle of a stream, by cutting the answer off before our own deadline.
Serve also repeats a request's id without checking it. The setting RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names
`middlewares`.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.http.request_id import MOVED_TIMEOUT_HEADER, TIMEOUT_HEADER, clean_request_id
from deployments.local.front_sockets import listen_privately

_TIMEOUT, _MOVED = TIMEOUT_HEADER.encode(), MOVED_TIMEOUT_HEADER.encode()
_REQUEST_ID = b"x-request-id"

Header = tuple[bytes, bytes]


def middlewares() -> list[Middleware]:
    listen_privately()  # Serve asks for the middlewares of a server right before it starts the server
    return [Middleware(SafeForServe)]


class SafeForServe:
    """Passes each request on with headers that Serve can decode, and with its time limit under a name that Serve ignores."""

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
