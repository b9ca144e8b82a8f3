"""What the references of a JSON schema name, and which draft it is written in."""

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urljoin

SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE_SCHEMAS: Final = (
    "additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
_DRAFTS: Final = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "draft/2019-09": 2019}
LATEST: Final = 2020


class Unsaid(Exception):
    """A part of the schema cannot be rewritten. Its keyword stays."""


class Exhausted(Exception):
    """Rewriting the schema takes too long."""


class Budget:
    """Of steps, each of about 10 us."""

    def __init__(self, num_steps: int) -> None:
        self._left = num_steps

    def spend(self, num_steps: int = 1) -> None:
        self._left -= num_steps
        if self._left < 0:
            raise Exhausted


def subschemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas that stand directly in the schema."""
    for key in SCHEMAS_BY_NAME:
        if isinstance(named := schema.get(key), dict):
            yield from named.values()
    for key in SCHEMA_LISTS:
        if isinstance(listed := schema.get(key), list):
            yield from listed
    for key in SINGLE_SCHEMAS:
        if isinstance(schema.get(key), dict):
            yield schema[key]


def draft_of(root: Any) -> int:
    """3, 4, 6, 7, 2019 or 2020; 2020 where the schema does not say."""
    named = str(root.get("$schema", "")) if isinstance(root, dict) else ""
    return next((draft for part, draft in _DRAFTS.items() if f"json-schema.org/{part}/" in named), LATEST)


class References:
    """Schemas by reference. Each of them stays alive, so that its identity names it."""

    def __init__(self, root: Any) -> None:
        self.draft = draft_of(root)
        self._bases: dict[int, str] = {}
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._scan(root)

    def target(self, schema: Mapping[str, Any]) -> Any:
        """What `$ref` or `$dynamicRef` of a schema names. Raises Unsaid where it is no part of the whole."""
        reference = schema.get("$ref", schema.get("$dynamicRef"))
        if not isinstance(reference, str) or ("$dynamicRef" in schema and len(self._resources) > 2):
            raise Unsaid
        base = self._bases.get(id(schema), "")
        try:
            uri, _, fragment = (base + reference if reference[:1] == "#" else urljoin(base, reference)).partition("#")
        except ValueError:
            raise Unsaid from None
        if uri not in self._resources:
            raise Unsaid
        if fragment and not fragment.startswith("/"):
            if (uri, fragment) not in self._anchors:
                raise Unsaid
            return self._anchors[uri, fragment]
        found = self._resources[uri]
        for part in fragment.split("/")[1:]:
            found = _member(found, unquote(part).replace("~1", "/").replace("~0", "~"))
        if not isinstance(found, dict | bool):
            raise Unsaid
        return found

    def is_original(self, schema: Any) -> bool:
        """Whether the schema stands in the whole, so that its identity is known to be its own."""
        return id(schema) in self._bases

    def _scan(self, root: Any) -> None:
        waiting = [(root, "")]
        while waiting:
            schema, base = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in self._bases:
                continue
            named = schema.get("id" if self.draft == 4 else "$id")
            if isinstance(named, str) and named and not (self.draft <= 7 and "$ref" in schema):
                if named.startswith("#"):
                    self._anchors[base, named[1:]] = schema
                else:
                    try:
                        base = urljoin(base, named).partition("#")[0]
                    except ValueError:
                        raise Unsaid from None
                    self._resources[base] = schema
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(key), str):
                    self._anchors[base, anchor] = schema
            self._bases[id(schema)] = base
            waiting += [(each, base) for each in subschemas(schema)]


def _member(value: Any, key: str) -> Any:
    if isinstance(value, dict) and key in value:
        return value[key]
    if isinstance(value, list) and key.isascii() and key.isdigit() and int(key[:9]) < len(value):
        return value[int(key[:9])]
    raise Unsaid
