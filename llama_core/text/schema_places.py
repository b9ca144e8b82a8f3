"""The parts of a JSON schema that llguidance compiles, each with its place.

A place is written as the places of other errors are: `.properties[2].items`. Keywords of JSON schema are named. Names of the
client, as those of properties, are counted from 0 in their order, because errors repeat nothing of the input.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
# Keywords of the drafts 4 to 2020-12 that llguidance refuses.
UNSUPPORTED: Final = frozenset(
    {"not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "dependencies",
     "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "$recursiveRef",
     "$recursiveAnchor", "$dynamicRef", "$dynamicAnchor", "contentSchema", "contentEncoding", "contentMediaType"}
)  # fmt: skip
KEYWORDS: Final = UNSUPPORTED | {
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions", "$schema", "$id", "id", "$anchor",
    "items", "prefixItems", "additionalItems", "minItems", "maxItems", "properties", "patternProperties",
    "additionalProperties", "required", "minProperties", "maxProperties", "minLength", "maxLength", "pattern", "format",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip
NAMED_SCHEMAS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf")
_TYPE: Final = {each: frozenset({each}) for each in TYPES}
_ALL_TYPES: Final = frozenset(TYPES)


class Part(NamedTuple):
    """A schema within a schema. place: behind the outer one's. is_needed: no value satisfies the outer schema unless one
    satisfies this."""

    place: str
    schema: Any
    is_needed: bool = False


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that the schema names, or all."""
    types = schema.get("type", _ALL_TYPES)
    if isinstance(types, str):
        return _TYPE.get(types, frozenset())
    if isinstance(types, list):
        return frozenset(each for each in types if each in TYPES)
    return _ALL_TYPES if types is _ALL_TYPES else frozenset()


def parts(schema: Any) -> list[Part]:
    """The schemas directly within `schema`, without definitions and those that references name."""
    if not isinstance(schema, dict):
        return []
    types = types_of(schema)
    found: list[Part] = []
    if "object" in types:
        found += _object_parts(schema, is_only=len(types) == 1)
    if "array" in types:
        found += _array_parts(schema, is_only=len(types) == 1)
    for key in SCHEMA_LISTS:
        each = schema.get(key)
        if isinstance(each, list):
            is_needed = key == "allOf" or len(each) == 1
            found += [Part(f".{key}[{i}]", one, is_needed) for i, one in enumerate(each)]
    return found


def _object_parts(schema: Mapping[str, Any], *, is_only: bool) -> Iterator[Part]:
    required = schema.get("required")
    required = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
    for key in ("properties", "patternProperties"):
        named = schema.get(key)
        for i, (name, each) in enumerate(named.items() if isinstance(named, dict) else ()):
            yield Part(f".{key}[{i}]", each, is_only and key == "properties" and name in required)
    if "additionalProperties" in schema:
        yield Part(".additionalProperties", schema["additionalProperties"])


def _array_parts(schema: Mapping[str, Any], *, is_only: bool) -> Iterator[Part]:
    fewest = schema.get("minItems")
    fewest = fewest if is_only and isinstance(fewest, int) else 0
    items, first, rest = schema.get("items"), "prefixItems", "items"
    if isinstance(items, list) or "additionalItems" in schema:  # drafts before 2020-12
        first, rest = "items", "additionalItems" if isinstance(items, list) else "items"
    listed = schema.get(first)
    listed = listed if isinstance(listed, list) else []
    yield from (Part(f".{first}[{i}]", each, i < fewest) for i, each in enumerate(listed))
    if rest in schema:
        yield Part(f".{rest}", schema[rest], fewest > len(listed))


class Target(NamedTuple):
    """What a reference names. place: None where a key on the way is neither a keyword nor counted."""

    place: str | None
    schema: Any


class SchemaTree:
    """A whole schema, in which references are followed."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._targets: dict[str, Target | None] = {}

    def target(self, reference: Any) -> Target | None:
        """What a JSON pointer behind "#" names; None for other references, and where it leads nowhere."""
        if not isinstance(reference, str) or reference[:1] != "#" or reference[1:2] not in ("", "/"):
            return None
        if reference not in self._targets:
            self._targets[reference] = self._found(reference)
        return self._targets[reference]

    def _found(self, reference: str) -> Target | None:
        place: str | None = ""
        found, counts = self.root, False  # counts: `found` has names of the client
        for token in reference[2:].split("/") if reference not in ("#", "#/") else ():
            token = unquote(token).replace("~1", "/").replace("~0", "~")
            step: str | None
            if isinstance(found, list) and token.isascii() and token.isdigit() and int(token[:9]) < len(found):
                found, step, counts = found[int(token)], f"[{int(token)}]", False
            elif isinstance(found, dict) and token in found:
                if counts:
                    step, counts = f"[{list(found).index(token)}]", False
                else:
                    step, counts = f".{token}" if token in KEYWORDS else None, token in NAMED_SCHEMAS
                found = found[token]
            else:
                return None
            place = None if place is None or step is None else place + step
        return Target(place, found)

    def referred(self, place: str, schema: Any) -> list[tuple[str, Any]]:
        """Place and schema of what the reference of `schema` names, if it has one. place: of `schema`."""
        named = self.target(schema.get("$ref")) if isinstance(schema, dict) else None
        if named is None:
            return []
        return [(f"{place}.$ref" if named.place is None else named.place, named.schema)]

    def reachable(self, place: str = "", schema: Any = None, *, definitions: bool = False) -> Iterator[tuple[str, Any]]:
        """Place and schema of every part of the root, or of `schema`, that is compiled: outer parts first, in their order.

        definitions: also those that no reference names.
        """

        def within(schema: Any) -> list[Part]:
            return [*parts(schema), *_definitions(schema)] if definitions else parts(schema)

        return self._walk([(place, self.root if schema is None else schema)], within)

    def needed(self) -> Iterator[tuple[str, Any]]:
        """Place and schema of the parts without which no value satisfies the root. Every schema that a reference names is one:
        llguidance refuses it even where the reference is optional."""

        def within(schema: Any) -> list[Part]:
            return [part for part in parts(schema) if part.is_needed]

        yield from self._walk([("", self.root)], within)
        named = [self.referred(*each) for each in self.reachable()]
        yield from self._walk([each for one in named for each in one], within)

    def _walk(
        self, begins: Sequence[tuple[str, Any]], within: Callable[[Any], Sequence[Part]]
    ) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        waiting = list(reversed(begins))
        while waiting:
            place, schema = waiting.pop()
            if isinstance(schema, dict):
                if id(schema) in seen:
                    continue
                seen.add(id(schema))
            yield place, schema
            inner = [(place + part.place, part.schema) for part in within(schema)]
            waiting += reversed(inner + self.referred(place, schema))


def _definitions(schema: Any) -> Iterator[Part]:
    for key in ("$defs", "definitions") if isinstance(schema, dict) else ():
        named = schema.get(key)
        yield from (
            Part(f".{key}[{i}]", each) for i, each in enumerate(named.values() if isinstance(named, dict) else ())
        )
