"""Decides which requests are answered: those with a configured API key, or, without any keys, those to an allowed host.
A route may ask for an admin key (`Access`).

The key is sent as `Authorization: Bearer KEY`, as the password of `Basic`, or as `x-api-key`. The probes /health, /ping and
/ready are always answered, but give a cause only to requests that are admitted.
"""

import base64
import binascii
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.api_keys import ApiKeys
from deployments.http.routing import Access, ApiRouter
from deployments.openai.errors import AdminKeyRequired, HostNotAllowed, Unauthorized, error_response
from llama_core.errors import LlamaError

LOCAL_DOMAINS = frozenset({"localhost", "local", "internal"})  # nobody can register a name below them
NO_ROUTES = Router()  # closes websockets, and takes part in the server's start
_HOST = re.compile(r"(?:\[(?P<ipv6>[^][]+)\]|(?P<name>[^][:]+))(?::[0-9]*)?")  # all of it: a browser resolves all of it


class AllowedHosts:
    """What a Host header may have without API keys, with any port: IP addresses, names without a dot or of a local domain, this
    machine's own, and the given names.

    Without the check, a web page could reach a server on loopback by DNS rebinding: the attacker makes the page's own name
    resolve to 127.0.0.1, and the browser takes the server for the page's origin. The attack needs a name of its own.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {name.strip().lower().rstrip(".") for name in (socket.gethostname(), *names)}
        self._allows = lru_cache(maxsize=256)(self._is_allowed)  # a client repeats its Host with every request

    def allow(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether every Host header is allowed. Browsers always send one, so a request without it is allowed."""
        return all(self._allows(value) for name, value in headers if name == b"host")

    def _is_allowed(self, host: bytes) -> bool:
        match = _HOST.fullmatch(host.decode("latin-1").strip().lower())
        if match is None:
            return False
        if match["ipv6"] is not None:
            return _is_address(match["ipv6"])
        name = match["name"].rstrip(".")
        _, dot, domain = name.rpartition(".")
        is_local = domain in LOCAL_DOMAINS if dot else name != ""
        return is_local or name in self._names or _is_address(name)


@dataclass(frozen=True, slots=True)
class AccessGuard:
    """Finds the route of a request and answers by it: or by 401 without a valid key, by 403 without the admin key that the
    route needs, and, where no keys are configured, by 403 for an unknown host.

    Sets `request.state.is_trusted`: the request has a key or names an allowed host. `request.state.owner`: the key's owner.
    `request.state.reads_metrics`: it may see what all keys together have asked for.
    An admin key is accepted wherever an API key is.
    """

    router: ApiRouter
    keys: ApiKeys
    admin_keys: ApiKeys
    hosts: AllowedHosts
    on_refused: Callable[[Scope, LlamaError], None]  # called for every request that is answered 401 or 403

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._chosen(scope)(scope, receive, send)

    def _chosen(self, scope: Scope) -> ASGIApp:
        """The application that answers: the route's, or a refusal."""
        if scope["type"] != "http":
            return NO_ROUTES
        state = scope.setdefault("state", {})
        key = key_of(scope["headers"])
        is_admin = (admin := self.admin_keys.owner_of(key)) is not None
        if self.keys.are_required:
            owner = self.keys.owner_of(key) or admin
            is_trusted = owner is not None
            if is_trusted:
                state["owner"] = owner
        else:
            is_trusted = self.hosts.allow(scope["headers"])
        state["is_trusted"] = is_trusted
        state["reads_metrics"] = is_trusted and (is_admin or not self.keys.are_several)
        access, app = self.router.find(scope)
        is_refused = {Access.ADMIN: not is_admin, Access.METRICS: not state["reads_metrics"]}.get(access, False)
        if access is Access.ANYONE or (is_trusted and not is_refused):
            return app
        error, headers = self._refusal(access, is_trusted)
        self.on_refused(scope, error)
        return error_response(error, scope, headers)

    def _refusal(self, access: Access, is_trusted: bool) -> tuple[LlamaError, dict[str, str]]:
        if is_trusted:
            why = ": there are several API keys" if access is Access.METRICS else ""
            return AdminKeyRequired(f"An admin key is required, one of the server's LLAMA_ADMIN_KEYS{why}."), {}
        if self.keys.are_required:
            challenge = 'Basic realm="API key as password"' if access is Access.PAGE else "Bearer"
            return Unauthorized("A valid API key is required."), {"WWW-Authenticate": challenge}
        text = "The Host header has a name that this server does not know: use its IP address or localhost, or add the name "
        return HostNotAllowed(text + "to allowed_hosts."), {}


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


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
