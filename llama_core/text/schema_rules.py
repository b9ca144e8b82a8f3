"""JSON schemas as rules of Lark, so that their numbers have a limited length (`schema_numbers`).

llguidance compiles schemas itself, but bounds no number and takes no terminal inside a schema. So lists, objects and
alternatives that may hold numbers become rules here, in the order and with the white space of llguidance's own; everything else
stays a schema (`%json`). What the rules cannot say, such as `patternProperties`, stays one too: its integers are bounded, its
other numbers are not. What llguidance lacks and `schema_forms` leaves becomes rules too: lists of distinct values of an enum,
lists that contain items of a schema, and numbers that are no integers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llama_core.text.schema_numbers import (
    NUMBER,
    bounded_schema,
    has_large_number,
    number_terminal,
)
from llama_core.text.schema_parts import (
    ARRAY,
    NOTES,
    NUMBER_FREE,
    NUMBER_LIMITS,
    OBJECT,
    definitions_with_numbers,
    is_number_free,
    listed,
)
from llama_core.text.schema_sets import counted_items, ordered_subset

MAX_CHARS: Final = 3 * 2**16
_SET: Final = ARRAY - {"prefixItems"} | {"uniqueItems"}
_CONTAINING: Final = ARRAY | {"contains", "minContains", "maxContains"}
_NO_INTEGER: Final = {"type": "integer"}  # under "not"
_ALL_TYPES: Final = frozenset({*NUMBER_FREE, "number", "array", "object"})
# References to other places than definitions, and keywords that change what a reference means.
_REFERS_OUTSIDE: Final = re.compile(
    r'"\$ref": (?!"#/(?:\$defs|definitions)/[^/"%~]*")|"\$(?:id|anchor|dynamicAnchor|dynamicRef)":'
)
# An additional key beside known ones. Only one way to write each character, so that no known key is written in another way.
_KEY: Final = r'/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt])*"/'


@dataclass(frozen=True, slots=True)
class Spacing:
    """White space between the parts of JSON. header: lines of Lark. comma, colon: items of its rules. options: llguidance's,
    for the same in a schema."""

    header: str
    comma: str
    colon: str
    options: Mapping[str, Any]


class _Unsaid(Exception):
    """The rules cannot say this part of the schema."""


def schema_rules(schema: Any, spacing: Spacing) -> str | None:
    """The rules, of which `start` is the value that the schema describes; None where `bounded_schema` says as much or more.

    The schema is one that llguidance has compiled, or one that was rewritten (`schema_forms`).
    """
    if has_large_number(schema) or _REFERS_OUTSIDE.search(json.dumps(schema)):
        return None
    try:
        rules = _Rules(schema, spacing)
        if rules.is_number_free(schema):
            return None
        start = f"start: {rules.item(schema)}"
    except (_TooLong, _Unsaid, RecursionError):
        return None
    return "\n".join([*filter(None, [spacing.header]), start, *rules.lines])


class _TooLong(Exception):
    """The rules exceed the limit of a grammar."""


class _Rules:
    """Rules of one schema. An item stands for a part of the schema in the body of a rule."""

    def __init__(self, root: Any, spacing: Spacing) -> None:
        self.lines: list[str] = []
        self._root = root if isinstance(root, dict) else {}
        self._spacing = spacing
        self._named: dict[str, str] = {}  # rules that several places share
        self._num_chars = 0
        self._with_number = definitions_with_numbers(self._root)

    def item(self, schema: Any) -> str:
        if schema is True or (isinstance(schema, dict) and not schema.keys() - NOTES):
            return self._any()
        try:
            if self.is_number_free(schema):
                return self._number_free(schema)
            return self._with_numbers({key: value for key, value in schema.items() if key not in NOTES})
        except _Unsaid:
            return self._left_as_schema(schema)

    def _left_as_schema(self, schema: Any) -> str:
        if schema is False:
            raise _Unsaid
        written = {key: value for key, value in schema.items() if key not in NOTES}
        own = f"schema {json.dumps(written)}"
        if own not in self._named:
            if '"$ref"' in own:
                written |= {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
            written = bounded_schema(written) | {"x-guidance": dict(self._spacing.options)}
            self._named[own] = self._rule("%json " + json.dumps(written, separators=(",", ":")))
        return self._named[own]

    def is_number_free(self, schema: Any) -> bool:
        """Whether a text of the schema has no number but of limited length."""
        refers: set[str] = set()
        return is_number_free(schema, refers) and not refers & self._with_number

    def _number_free(self, schema: Any) -> str:
        keys = schema.keys() - NOTES if isinstance(schema, dict) else set()
        if keys == {"$ref"}:
            return self._reference(schema["$ref"])
        if keys == {"type"} and schema["type"] in ("string", "integer", "boolean", "null"):
            return self._plain(schema["type"])
        return self._left_as_schema(schema)

    def _with_numbers(self, schema: dict[str, Any]) -> str:
        keys = schema.keys()
        if keys == {"$ref"}:
            return self._reference(schema["$ref"])
        if keys == {"anyOf"} or keys == {"oneOf"}:  # alternatives of oneOf exclude each other, or it had been refused
            return self._alternatives([each for each in listed(*schema.values()) if each is not False])
        if keys == {"allOf"} and len(listed(schema["allOf"])) == 1:
            return self.item(schema["allOf"][0])
        types = schema.get("type")
        if isinstance(types, list) and set(types) <= _ALL_TYPES:
            return self._alternatives([_of_type(schema, each) for each in types])
        if types == "number" and keys <= NUMBER_LIMITS and (body := number_terminal(schema)) is not None:
            return self._shared("number" if keys == {"type"} else f"number {body}", body)
        if types == "number" and keys <= NUMBER_LIMITS | {"not"} and schema.get("not") == _NO_INTEGER:
            if (body := number_terminal(schema, is_integer=False)) is None:
                raise _Unsaid
            return self._shared(f"fraction {body}", body)
        if types == "array" and keys <= ARRAY:
            return self._array(schema)
        if types == "array" and keys <= _CONTAINING and isinstance(schema.get("contains"), list):
            return self._containing(schema)
        if types == "array" and keys <= _SET and schema["uniqueItems"] is True:
            return self._set(schema)
        if types == "object" and keys <= OBJECT:
            return self._object(schema)
        raise _Unsaid

    def _alternatives(self, schemas: Sequence[Any]) -> str:
        if not schemas:
            raise _Unsaid
        return self._rule(" | ".join(map(self.item, schemas)))

    def _definition(self, name: str) -> Any:
        kind, _, key = name.removeprefix("#/").partition("/")
        return self._root[kind][key]

    def _reference(self, name: str) -> str:
        if name not in self._named:
            rule = self._named[name] = f"r{len(self.lines)}"
            at = len(self.lines)
            self.lines.append("")  # before the definition's own rules, which may refer to this one
            self.lines[at] = f"{rule}: {self.item(self._definition(name))}"
        return self._named[name]

    def _array(self, schema: dict[str, Any]) -> str:
        first = listed(schema.get("prefixItems", []))
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        rest = schema.get("items", True)
        if not isinstance(rest, bool | dict) or not _are_counts(fewest, most) or (most is not None and fewest > most):
            raise _Unsaid
        if most is not None and most <= len(first):
            first, rest = first[:most], False
        if False in first or (rest is False and fewest > len(first)):
            raise _Unsaid
        count = len(first)
        body = (
            ""
            if rest is False
            else self._repeated(self.item(rest), fewest - count, None if most is None else most - count, count > 0)
        )
        for i in range(count - 1, -1, -1):
            comma = f"{self._spacing.comma} " if i else ""
            body = f"{comma}{self.item(first[i])} {body}".rstrip()
            if i >= fewest:
                body = f"({body})?"
        return self._rule(f'"[" {body} "]"'.replace("  ", " "))

    def _set(self, schema: dict[str, Any]) -> str:
        """A list of values of an enum, each at most once, in the order of the enum."""
        values = schema["items"].get("enum") if isinstance(schema.get("items"), dict) else None
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if not values or schema["items"].keys() - NOTES != {"enum"} or not _are_counts(fewest, most):
            raise _Unsaid
        items = [self.item({"const": value}) for value in values]
        if (body := ordered_subset(items, fewest, most, self._spacing.comma, self._rule)) is None:
            raise _Unsaid
        return self._rule(f'"[" {body}')

    def _containing(self, schema: dict[str, Any]) -> str:
        """A list, among whose items behind the prefix so many follow `contains`."""
        first, rest = listed(schema.get("prefixItems", [])), schema.get("items", True)
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        kind_limits = schema.get("minContains", 1), schema.get("maxContains")
        if False in first or len(schema["contains"]) != 1 or not _are_counts(fewest, most, *kind_limits):
            raise _Unsaid
        body = counted_items(
            self.item(schema["contains"][0]),
            kind_limits,
            None if rest is False else self.item(rest),
            (max(fewest - len(first), 0), None if most is None else most - len(first)),
            self._spacing.comma,
            self._rule,
            is_behind=bool(first),
        )
        if body is None or (first and not kind_limits[0]):
            raise _Unsaid
        items = f" {self._spacing.comma} ".join(map(self.item, first))
        return self._rule(" ".join(['"["', *filter(None, [items]), body]))

    def _repeated(self, item: str, fewest: int, most: int | None, is_behind: bool) -> str:
        """`item` some times with commas between. is_behind: a comma comes before it."""
        comma = self._spacing.comma
        fewest = max(fewest, 0)
        if most == 0:
            return ""
        if is_behind:
            return f"({comma} {item}){_times(fewest, most)}"
        more = f"{item} ({comma} {item}){_times(max(fewest - 1, 0), None if most is None else most - 1)}"
        more = item if most == 1 else more
        return more if fewest else f"({more})?"

    def _object(self, schema: dict[str, Any]) -> str:
        properties, required = dict(schema.get("properties", {})), list(schema.get("required", []))
        fewest, most = schema.get("minProperties", 0), schema.get("maxProperties")
        rest = schema.get("additionalProperties", True)
        properties |= {name: rest for name in required if name not in properties}
        if any(properties[name] is False for name in required) or not _are_counts(fewest, most):
            raise _Unsaid
        known = {name: each for name, each in properties.items() if each is not False}
        if (fewest or most is not None) and len(required) < len(known):
            raise _Unsaid
        fewest, most = max(fewest - len(known), 0), None if most is None else most - len(known)
        if (most is not None and most < fewest) or (rest is False and fewest):
            raise _Unsaid
        pairs = [f"{_key_text(name)} {self._spacing.colon} {self.item(each)}" for name, each in known.items()]
        has_more = rest is not False and most != 0
        more = f"{self._key(list(properties))} {self._spacing.colon} {self.item(rest)}" if has_more else ""
        if has_more:
            more = self._rule(more)
        return self._members(pairs, [name in required for name in known], (more, fewest, most))

    def _members(self, pairs: Sequence[str], needed: Sequence[bool], rest: tuple[str, int, int | None]) -> str:
        """An object of `pairs` in their order and then of `rest`, an item with the fewest and most times."""
        item, fewest, most = rest
        comma = self._spacing.comma
        alone, behind = (
            f'{self._repeated(item, fewest, most, is_behind) if item else ""} "}}"'.strip()
            for is_behind in (False, True)
        )
        if not pairs:
            return self._rule(f'"{{" {alone}')
        if True in needed:
            first = needed.index(True)
            before = [f"({pair} {comma})?" for pair in pairs[:first]]
            after = [f"{comma} {pair}" for pair in pairs[first + 1 :]]
            after = [
                each if is_needed else f"({each})?" for each, is_needed in zip(after, needed[first + 1 :], strict=True)
            ]
            return self._rule(" ".join(['"{"', *before, pairs[first], *after, behind]))
        names = [self._rule(pair) for pair in pairs]
        follows = self._rule(behind)
        begins = [alone]
        for name in reversed(names):
            begins.append(f"{name} {follows}")
            follows = self._rule(f"({comma} {name})? {follows}")
        return self._rule(f'"{{" ({" | ".join(reversed(begins))})')

    def _key(self, known: Sequence[str]) -> str:
        if not known:
            return self._plain("string")
        names = " | ".join(map(_key_text, known))
        return self._shared(f"key {names}", f"{_KEY} & ~({names})")

    def _any(self) -> str:
        if "any" not in self._named:
            rule = self._named["any"] = f"r{len(self.lines)}"
            at = len(self.lines)
            self.lines.append("")
            scalars = [self._plain(each) for each in ("string", "boolean", "null")]
            parts = [*scalars, self._shared("number", f"/{NUMBER}/"), self._array({}), self._object({})]
            self.lines[at] = f"{rule}: {' | '.join(parts)}"
        return self._named["any"]

    def _plain(self, kind: str) -> str:
        if kind == "boolean":
            return '("true" | "false")'
        if kind == "null":
            return '"null"'
        return self._left_as_schema({"type": kind})

    def _shared(self, key: str, body: str) -> str:
        """A terminal."""
        if key not in self._named:
            self._named[key] = self._rule(body, "T")
        return self._named[key]

    def _rule(self, body: str, kind: str = "r") -> str:
        self._num_chars += len(body)
        if self._num_chars > MAX_CHARS:
            raise _TooLong
        name = f"{kind}{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name


def _of_type(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The schema of one of its types, without keywords of the others."""
    own = {"object": OBJECT, "array": ARRAY, "number": NUMBER_LIMITS, "integer": NUMBER_LIMITS}.get(kind, frozenset())
    others = (OBJECT | ARRAY | NUMBER_LIMITS) - own
    return {key: value for key, value in schema.items() if key not in others} | {"type": kind}


def _are_counts(*values: Any) -> bool:
    return all(
        value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0) for value in values
    )


def _times(fewest: int, most: int | None) -> str:
    return f"{{{fewest},{'' if most is None else most}}}"


def _key_text(name: str) -> str:
    """A key of JSON as a string of Lark. As in llguidance's grammars, letters beyond ASCII are not escaped."""
    return json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
