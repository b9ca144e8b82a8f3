"""Joins and negates unions of terms."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from llama_core.text.schema_forms.references import Budget, Unsaid
from llama_core.text.schema_forms.terms import (
    EVERYTHING,
    KINDS,
    NOTHING,
    Term,
    alike,
    both,
    item_schema,
    matches,
    negated_schema,
    same,
    tidy,
)

_MAX_TERMS: Final = 128
_LARGEST: Final = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_SMALLEST: Final = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_ANY_OF_BOTH: Final = frozenset({"integer", "fraction", "uniqueItems", "unsaid"})
_OPPOSITE: Final = {
    "minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum",
}  # fmt: skip
_OPPOSITE_COUNT: Final = {
    "minLength": ("maxLength", -1), "maxLength": ("minLength", 1), "minItems": ("maxItems", -1), "maxItems": ("minItems", 1),
    "minProperties": ("maxProperties", -1), "maxProperties": ("minProperties", 1),
}  # fmt: skip
_STRUCTURE: Final = frozenset({"properties", "patternProperties", "additionalProperties", "prefixItems", "items"})


def product(first: Sequence[Term], second: Sequence[Term], budget: Budget) -> list[Term]:
    """The terms that values of both unions follow."""
    found: list[Term] = []
    for each in first:
        for other in second:
            if each.kind == other.kind:
                budget.spend(1 + (_size(each) + _size(other) + len(found)) // 8)
                if (term := _joined(each, other)) is not None and not any(alike(term, one) for one in found):
                    found.append(term)
                    if len(found) > _MAX_TERMS:
                        raise Unsaid
    return found


def _size(term: Term) -> int:
    return len(term.keys.get("properties", ())) + len(term.keys.get("enum", ()))


def _joined(first: Term, second: Term) -> Term | None:
    if not second.keys and second.seen == NOTHING:
        return first
    if not second.keys:
        return replace(first, seen=first.seen.with_(second.seen))
    keys = dict(first.keys)
    if first.kind == "object":
        keys |= _joined_object(first.keys, second.keys)
    if first.kind == "array":
        keys |= _joined_array(first.keys, second.keys)
    for key, value in second.keys.items():
        if key in _STRUCTURE:
            continue
        if key not in first.keys:
            keys[key] = value
        elif key in _LARGEST:
            keys[key] = max(keys[key], value)
        elif key in _SMALLEST:
            keys[key] = min(keys[key], value)
        elif key in _ANY_OF_BOTH:
            keys[key] = True
        elif key == "enum":
            allowed = {same(each) for each in value}
            keys[key] = tuple(each for each in keys[key] if same(each) in allowed)
        else:
            keys[key] = keys[key] + tuple(each for each in value if not any(alike(each, one) for one in keys[key]))
    return tidy(Term(first.kind, keys, first.seen.with_(second.seen)))


def _joined_array(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    count = max(len(each.get("prefixItems", ())) for each in (first, second))
    prefix = tuple(both(item_schema(first, i), item_schema(second, i)) for i in range(count))
    return {"prefixItems": prefix, "items": both(first.get("items", True), second.get("items", True))}


def _joined_object(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    sides = [
        (each.get("properties", {}), each.get("patternProperties", {}), each.get("additionalProperties", True))
        for each in (first, second)
    ]
    names = list(dict.fromkeys([*sides[0][0], *sides[1][0]]))
    properties = {name: both(*(_named(side, name) for side in sides)) for name in names}
    patterns: dict[str, Any] = {}
    for (_, own, _), (_, others, rest) in (sides, sides[::-1]):
        for pattern, schema in own.items():
            if pattern in others or rest is True:
                patterns[pattern] = both(patterns.get(pattern, True), schema)
            elif rest is False and not others:
                for name in properties:
                    if matches(pattern, name):
                        properties[name] = both(properties[name], schema)
            else:
                raise Unsaid
    return {
        "properties": properties,
        "patternProperties": patterns,
        "additionalProperties": both(sides[0][2], sides[1][2]),
    }


def _named(side: tuple[Mapping[str, Any], Mapping[str, Any], Any], name: str) -> Any:
    """The schema of a property but for patterns, which stay beside it."""
    properties, patterns, rest = side
    if name in properties:
        return properties[name]
    return True if rest is True or any(matches(pattern, name) for pattern in patterns) else rest


def negated(terms: Sequence[Term], budget: Budget) -> list[Term]:
    """The terms that all other values follow."""
    found = EVERYTHING
    for term in terms:
        found = product(found, list(_negated(term)), budget)
    return found


def _negated(term: Term) -> Iterator[Term]:
    yield from (Term(kind) for kind in KINDS if kind != term.kind)
    for key, value in term.keys.items():
        for keys in _negated_key(term, key, value):
            if (found := tidy(Term(term.kind, keys))) is not None:
                yield found


def _negated_key(term: Term, key: str, value: Any) -> Iterator[dict[str, Any]]:
    if key in _OPPOSITE:
        yield {_OPPOSITE[key]: value}
    elif key in _OPPOSITE_COUNT:
        opposite, step = _OPPOSITE_COUNT[key]
        if value + step >= 0:
            yield {opposite: value + step}
    elif key == "enum":
        yield from _other_values(term.kind, value)
    elif key == "not":
        yield {"enum": value}
    elif key in ("integer", "fraction"):
        yield {"fraction" if key == "integer" else "integer": True}
    elif key == "required":
        yield from ({"properties": {name: False}} for name in value)
    elif key == "properties":
        for name, schema in value.items():
            yield {"required": (name,), "properties": {name: negated_schema(schema)}}
    elif key == "prefixItems":
        for i, schema in enumerate(value):
            yield {"minItems": i + 1, "prefixItems": (True,) * i + (negated_schema(schema),)}
    elif key == "items" and value is False:
        yield {"minItems": len(term.keys.get("prefixItems", ())) + 1}
    elif key == "contains":
        for schema, fewest, most in value:
            if fewest == 1 and most == math.inf:
                yield {"items": negated_schema(schema)}
            else:
                yield {"unsaid": True}
    elif key in ("items", "additionalProperties", "patternProperties"):
        if value not in (True, {}):
            yield {"unsaid": True}
    elif key != "format":  # an annotation, which excludes nothing
        yield {"unsaid": True}


def _other_values(kind: str, values: Sequence[Any]) -> Iterator[dict[str, Any]]:
    if kind == "string":
        yield {"not": tuple(values)}
    elif kind == "boolean":
        yield {"enum": tuple(value for value in (False, True) if value not in values)}
    elif kind == "number":
        limits = sorted(dict.fromkeys(values))
        for low, high in zip([None, *limits], [*limits, None], strict=True):
            yield ({} if low is None else {"exclusiveMinimum": low}) | (
                {} if high is None else {"exclusiveMaximum": high}
            )
    elif kind != "null":
        yield {"unsaid": True}
