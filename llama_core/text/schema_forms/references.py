"""What the references of a JSON schema name, and which draft it is written in."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urljoin, urlsplit

SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE_SCHEMAS: Final = (
    "additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
LATEST: Final = 2020
_DRAFTS: Final = {
    "draft-04/": 4, "draft-06/": 6, "draft-07/": 7, "draft/2019-09/": 2019, "draft/2020-12/": LATEST, "": LATEST
}  # fmt: skip
_DRAFT: Final = re.compile(r"https?://json-schema\.org/(draft\S*/)?schema#?")


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


def in_place(schema: Any) -> list[Any]:
    """The schema, and those within it that are applied to the same value. Without those that references name."""
    found: list[Any] = []
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            found.append(each)
            for key in ("allOf", "anyOf", "oneOf"):
                waiting += each[key] if isinstance(each.get(key), list) else []
            for key in ("dependentSchemas", "dependencies"):
                waiting += each[key].values() if isinstance(each.get(key), dict) else []
            waiting += [each[key] for key in ("not", "if", "then", "else") if key in each]
    return found


def draft_of(root: Mapping[str, Any]) -> int:
    """4, 6, 7, 2019 or 2020; 2020 where the schema does not say. Raises Unsaid for another one."""
    named = _DRAFT.fullmatch(str(root.get("$schema", "http://json-schema.org/schema")))
    if named is None or (named[1] or "") not in _DRAFTS:
        raise Unsaid
    return _DRAFTS[named[1] or ""]


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
        if not self.is_original(schema) and len(self._resources) > 1:
            raise Unsaid  # its base is not known
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
                        base = urlsplit(urljoin(base, named))._replace(fragment="").geturl()
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
