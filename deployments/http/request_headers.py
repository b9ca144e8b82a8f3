"""The headers of a request, decoded once: Starlette searches and decodes them again at every look."""

from collections.abc import Mapping

from starlette.types import Scope

_KEY = "llama.headers"


def headers_of(scope: Scope) -> Mapping[str, str]:
    """By names in lower case. Of several with one name the first counts, as in Starlette's `Headers`."""
    state: dict[str, object] = scope.setdefault("state", {})
    found = state.get(_KEY)
    if found is None:
        found = state[_KEY] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(list(scope["headers"]))
        }
    assert isinstance(found, dict)
    return found
