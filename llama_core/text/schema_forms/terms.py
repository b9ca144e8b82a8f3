"""Terms: JSON schemas of one type without applicators in place, which can be joined, negated and told apart.

A term's keys are those of JSON schema, but lists are tuples, several of `pattern`, `format`, `multipleOf`, `contains` and
`propertyNames` may stand together, `integer`, `fraction` and `not` (of strings) are own ones, and `unsaid` marks a constraint
that no schema can say. The schemas of items and properties stay schemas.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from llama_core.text.schema_forms.references import Unsaid
from llama_core.text.schema_parts import NOTES

KINDS: Final = ("null", "boolean", "number", "string", "array", "object")
# Regular expressions that Python, JavaScript and Rust read alike, for names of ASCII.
_PLAIN_REGEX: Final = re.compile(
    r"(?:[\w \-^$.*+|/:,@~]|\\[dw.]|\[[\w\-.]+\]|\{\d+(?:,\d*)?\}|\((?:\?:)?|\)|\?)*", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What annotations say is evaluated: names of properties, patterns of names, the first items, and schemas of items."""

    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all_names: bool = False
    num_items: float = 0  # infinite: all
    contained: tuple[Any, ...] = ()

    def with_(self, other: "Seen") -> "Seen":
        return Seen(
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_names or other.all_names,
            max(self.num_items, other.num_items),
            self.contained + other.contained,
        )


NOTHING: Final = Seen()


@dataclass(frozen=True, slots=True)
class Term:
    kind: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    seen: Seen = NOTHING


EVERYTHING: Final = [Term(kind) for kind in KINDS]


def kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {int: "number", float: "number", str: "string", list: "array"}.get(type(value), "object")


def same(value: Any) -> str:
    """A text that values have in common which are equal in JSON schema: 1 and 1.0, but not true."""
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return {key: _whole(each) for key, each in value.items()} if isinstance(value, dict) else value


def alike(first: Any, second: Any) -> bool:
    """Whether both are written alike: in Python, 1 equals true."""
    return first is second or (first == second and repr(first) == repr(second))


def distinct(values: Sequence[Any]) -> list[Any]:
    return list({same(value): value for value in reversed(values)}.values())[::-1]


def negated_schema(schema: Any) -> Any:
    schema = _shortened(schema)
    if isinstance(schema, bool):
        return not schema
    return schema["not"] if schema.keys() == {"not"} else {"not": schema}


def both(first: Any, second: Any) -> Any:
    """The schema of values that follow both schemas."""
    first, second = _shortened(first), _shortened(second)
    if first is True or second is False or alike(first, second):
        return second
    if second is True or first is False:
        return first
    values = [_values_of(each) for each in (first, second)]
    if values[0] is not None and values[1] is not None:
        allowed = {same(value) for value in values[1]}
        kept = [value for value in values[0] if same(value) in allowed]
        return {"enum": kept} if kept else False
    return {"allOf": [*_conjuncts(first), *_conjuncts(second)]}


def _shortened(schema: Any) -> Any:
    return True if isinstance(schema, dict) and not schema.keys() - NOTES else schema


def _conjuncts(schema: Any) -> list[Any]:
    return list(schema["allOf"]) if schema.keys() == {"allOf"} else [schema]


def _values_of(schema: Any) -> list[Any] | None:
    keys = schema.keys() - NOTES
    if keys == {"enum"} and isinstance(schema["enum"], list):
        return list(schema["enum"])
    return [schema["const"]] if keys == {"const"} else None


def matches(pattern: str, name: str) -> bool:
    """Whether the regular expression finds something in the name. Raises Unsaid unless that is sure."""
    if not _PLAIN_REGEX.fullmatch(pattern) or not name.isascii() or "\n" in name:
        raise Unsaid
    try:
        return re.search(pattern, name, re.ASCII) is not None
    except re.error:
        raise Unsaid from None


def item_schema(keys: Mapping[str, Any], i: int) -> Any:
    prefix = keys.get("prefixItems", ())
    return prefix[i] if i < len(prefix) else keys.get("items", True)


def tidy(term: Term) -> Term | None:
    """The term without what its values make needless; None where surely no value follows it."""
    keys = dict(term.keys)
    if "enum" in keys and term.kind in ("number", "string"):
        keys["enum"] = tuple(value for value in keys["enum"] if _fits(keys, value))
        keys = {key: value for key, value in keys.items() if key not in _CHECKED}
    if keys.get("enum") == ():
        return None
    if not _TIDY.get(term.kind, _tidy_limits)(keys):
        return None
    return replace(term, keys=keys)


_CHECKED: Final = frozenset(
    {
        "integer",
        "fraction",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minLength",
        "maxLength",
        "not",
    }
)


def _fits(keys: Mapping[str, Any], value: Any) -> bool:
    if isinstance(value, str):
        return keys.get("minLength", 0) <= len(value) <= keys.get("maxLength", math.inf) and value not in keys.get(
            "not", ()
        )
    if keys.get("fraction") if float(value).is_integer() else keys.get("integer"):
        return False
    return bool(
        keys.get("minimum", -math.inf) <= value <= keys.get("maximum", math.inf)
        and keys.get("exclusiveMinimum", -math.inf) < value < keys.get("exclusiveMaximum", math.inf)
    )


def _tidy_limits(keys: Mapping[str, Any]) -> bool:
    if ("integer" in keys and "fraction" in keys) or keys.get("minLength", 0) > keys.get("maxLength", math.inf):
        return False
    low = max(keys.get("minimum", -math.inf), keys.get("exclusiveMinimum", -math.inf))
    high = min(keys.get("maximum", math.inf), keys.get("exclusiveMaximum", math.inf))
    if low < high:
        return True
    return bool(low == high != keys.get("exclusiveMinimum") and high != keys.get("exclusiveMaximum"))


def _tidy_array(keys: dict[str, Any]) -> bool:
    prefix = keys.get("prefixItems", ())
    most = keys.get("maxItems", math.inf)
    most = min([most, *(i for i, schema in enumerate(prefix) if schema is False)])
    most = min(most, len(prefix)) if keys.get("items", True) is False else most
    if most < keys.get("minItems", 0):
        return False
    if most < math.inf:
        keys["maxItems"] = int(most)
    if most <= 1:
        keys.pop("uniqueItems", None)
    return True


def _tidy_object(keys: dict[str, Any]) -> bool:
    properties, required = keys.get("properties", {}), keys.get("required", ())
    rest = keys.get("additionalProperties", True) if not keys.get("patternProperties") else True
    if any(properties.get(name, rest) is False for name in required):
        return False
    most = keys.get("maxProperties", math.inf)
    most = 0 if rest is False and all(each is False for each in properties.values()) else most
    return bool(max(keys.get("minProperties", 0), len(required)) <= most)


_TIDY: Final[dict[str, Callable[[dict[str, Any]], bool]]] = {"array": _tidy_array, "object": _tidy_object}
