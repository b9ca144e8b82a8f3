"""The names that a request may have in its Host header, where no API keys are configured.

Without the check, a web page could reach a server on loopback by DNS rebinding: the attacker makes the page's own
name resolve to 127.0.0.1, and the browser takes the server for the page's origin. The attack needs a name, so addresses are
safe.
"""

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache

LOCAL_NAMES = frozenset({"localhost"})
_HOST = re.compile(r"(?:\[(?P<ipv6>[^][]+)\]|(?P<name>[^][:]+))(?::[0-9]*)?")  # all of it: a browser resolves all of it


class AllowedHosts:
    """IP addresses, `localhost`, and the given names, each with any port."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = LOCAL_NAMES | {name.strip().lower().rstrip(".") for name in names}
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
        return name in self._names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
