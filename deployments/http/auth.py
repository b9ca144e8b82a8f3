"""Lets a request through if it carries a configured API key. The probes need no key.

The key is sent as `Authorization: Bearer KEY`, as the password of `Basic`, or as `x-api-key`.
"""

import base64
import binascii
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api_keys import ApiKeys
from deployments.http.errors import Unauthorized, error_response
from deployments.http.routing import route_path

PROBE_PATHS = frozenset({"/health", "/ready"})  # load balancers and Kubernetes send no key
PAGE_PATHS = frozenset(
    {"/", "/docs"}
)  # a browser asks its user for a password here, and sends it with the page's requests


class ApiKeyGuard:
    """Answers 401 to a request without a valid key. Where keys are configured, `request.state.owner` names the key's owner."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, on_refused: Callable[[Scope, Unauthorized], None]) -> None:
        """`on_refused` is called for every request that is answered 401."""
        self._app = app
        self._keys = keys
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._keys.are_required:
            return await self._app(scope, receive, send)
        path = route_path(scope)
        owner = self._keys.owner_of(key_of(scope["headers"]))
        if owner is None and scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if owner is None and path not in PROBE_PATHS:
            challenge = 'Basic realm="API key as password"' if path in PAGE_PATHS else "Bearer"
            error = Unauthorized("A valid API key is required.")
            self._on_refused(scope, error)
            return await error_response(error, {"WWW-Authenticate": challenge})(scope, receive, send)
        if owner is not None:
            scope.setdefault("state", {})["owner"] = owner
        await self._app(scope, receive, send)


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key that a request carries; b"" if it carries none."""
    found = dict(headers)
    kind, _, value = found.get(b"authorization", b"").partition(b" ")
    value = value.strip()
    if kind.lower() == b"bearer":
        return value
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return found.get(b"x-api-key", b"")
