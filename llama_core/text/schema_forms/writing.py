"""Writes a union of terms as a JSON schema that llguidance knows."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Final

from llama_core.text.schema_forms.expansion import Expansion
from llama_core.text.schema_forms.references import Unsaid
from llama_core.text.schema_forms.terms import KINDS, Term, alike, both, distinct, matches, negated_schema, tidy
from llama_core.text.schema_forms.unique_lists import AT_RUN_TIME, can_compare
from llama_core.text.schema_sets import has_rules

_MAX_POSITIONS: Final = 6  # of an item that a list must contain, each as an alternative
_MAX_NAMES: Final = 256
_MAX_INTEGERS: Final = 64  # of a range that is written as an enum
_FAR: Final = 2**53
_RANGE: Final = frozenset({"integer", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})


class Writer:
    """Of unions of the schemas of one whole schema. keeps_unique: lists of distinct items may stand in the schema where their
    values cannot be listed (`unique_lists`)."""

    def __init__(self, expansion: Expansion, *, keeps_unique: bool = False) -> None:
        self._expansion = expansion
        self._keeps_unique = keeps_unique

    def _values_of(self, schema: Any) -> list[Any]:
        """All values of the schema, in its order. Raises Unsaid where they may be more."""
        found: list[Any] = []
        for term in self._expansion.terms(schema):
            values: Sequence[Any] = {"null": (None,), "boolean": (False, True)}.get(term.kind, ())
            values = _integers_between(term.keys) if term.keys.get("integer") else term.keys.get("enum", values)
            if not values or not term.keys.keys() <= (_RANGE if term.keys.get("integer") else {"enum"}):
                raise Unsaid
            found += values
        own = schema.get("enum", ()) if isinstance(schema, dict) else ()
        order = {json.dumps(value): i for i, value in enumerate(own)} if isinstance(own, list) else {}
        return distinct(sorted(found, key=lambda value: order.get(json.dumps(value), len(order))))

    def written(self, terms: Sequence[Term]) -> Any:
        """The union as a schema, whose inner schemas are yet to be rewritten."""
        resolved = [made for term in terms for one in self._with_names(term) for made in self._with_contents(one)]
        whole = {term.kind for term in resolved if not term.keys}
        if whole == set(KINDS):
            return True
        parts: list[Any] = (
            [{"type": kinds if len(kinds := [k for k in KINDS if k in whole]) > 1 else kinds[0]}] if whole else []
        )
        for term in resolved:
            part = None if term.kind in whole else self._part(term)
            if part is not None and not any(alike(part, one) for one in parts):
                parts.append(part)
        return (parts[0] if len(parts) == 1 else {"anyOf": parts}) if parts else False

    def _part(self, term: Term) -> dict[str, Any]:
        keys = dict(term.keys)
        if "unsaid" in keys:
            raise Unsaid
        kind = "integer" if keys.pop("integer", False) else term.kind
        part: dict[str, Any] = {"type": kind}
        if keys.pop("fraction", False):
            part["not"] = {"type": "integer"}
        more: list[Any] = []
        if others := keys.pop("not", ()):
            keys["pattern"] = (*keys.get("pattern", ()), _none_of(others))
        for key, value in keys.items():
            if key == "contains":
                continue
            if key in ("pattern", "format", "multipleOf"):
                part[key] = value[0]
                more += [{key: each} for each in value[1:]]
            elif isinstance(value, tuple):
                if value:
                    part[key] = list(value)
            elif key == "uniqueItems" or (value is not True and value != {}):
                part[key] = value
        if "uniqueItems" in keys:
            part |= self._unique_items(keys)
        if "contains" in keys:
            part |= _contained(keys)
        if keys.keys() == {"enum"}:
            part.pop("type")
        return part | ({"allOf": more} if more else {})

    def _unique_items(self, keys: Mapping[str, Any]) -> dict[str, Any]:
        first, rest = keys.get("prefixItems", ()), keys.get("items", True)
        values = None if first or isinstance(rest, bool) else self._values_or_none(rest)
        fewest, most = keys.get("minItems", 0), keys.get("maxItems")
        if values is not None and (not self._keeps_unique or has_rules(len(values), fewest, most)):
            return {"items": {"enum": values}}
        if not self._keeps_unique or "contains" in keys:
            raise Unsaid
        if not all(can_compare(self._expansion.terms(each)) for each in (*first, rest)):
            raise Unsaid
        if values is None:
            return {"uniqueItems": AT_RUN_TIME}
        if fewest > len(values):
            raise Unsaid
        most = len(values) if most is None else min(most, len(values))
        return {"uniqueItems": AT_RUN_TIME, "items": {"enum": values}, "maxItems": most}

    def _values_or_none(self, schema: Any) -> list[Any] | None:
        try:
            return self._values_of(schema)
        except Unsaid:
            return None

    def _with_contents(self, term: Term) -> list[Term]:
        """The terms that say what the term says with one `contains` at most, about the items behind the prefix."""
        found = [replace(term, keys={key: value for key, value in term.keys.items() if key != "contains"})]
        for schema, fewest, most in term.keys.get("contains", ()):
            union = []
            for each in found:
                union += [Term("array", keys) for keys in _containing(each.keys, schema, fewest, most)]
            found = [each for each in self._expansion.product(found, union) if not self._expansion.is_empty(each)]
        num_first = len(term.keys.get("prefixItems", ()))
        if any("contains" in each.keys and len(each.keys.get("prefixItems", ())) > num_first for each in found):
            raise Unsaid
        return found

    def _with_names(self, term: Term) -> list[Term]:
        """The terms that say without `propertyNames` what the term says."""
        if "propertyNames" not in term.keys:
            return [term]
        keys = dict(term.keys)
        schema = reduce(both, keys.pop("propertyNames"), True)
        strings = [each for each in self._expansion.terms(schema) if each.kind == "string"]
        if any(not each.keys for each in strings):
            return [replace(term, keys=keys)]
        properties, rest = keys.get("properties", {}), keys.get("additionalProperties", True)
        if all("enum" in each.keys and len(each.keys) == 1 for each in strings):
            names = distinct([name for each in strings for name in each.keys["enum"]])
            if len(names) > _MAX_NAMES:
                raise Unsaid
            names = [
                *(name for name in properties if name in names),
                *(name for name in names if name not in properties),
            ]
            keys["properties"] = {name: _property(keys, name) for name in names}
            keys["patternProperties"] = {}
        else:
            pattern = "|".join(_regex(each.keys) for each in strings)
            if keys.get("patternProperties") or (properties and rest is not True):
                raise Unsaid
            keys["properties"] = {name: each for name, each in properties.items() if matches(pattern, name)}
            keys["patternProperties"] = {pattern: rest}
        found = tidy(replace(term, keys=keys | {"additionalProperties": False}))
        return [found] if found is not None else []


def _integers_between(keys: Mapping[str, Any]) -> Sequence[int]:
    """All integers between the limits; none where they may be many."""
    low = max(keys.get("minimum", -math.inf), math.floor(keys.get("exclusiveMinimum", -_FAR)) + 1)
    high = min(keys.get("maximum", math.inf), math.ceil(keys.get("exclusiveMaximum", _FAR)) - 1)
    if high - low >= _MAX_INTEGERS or max(abs(low), abs(high)) >= _FAR:
        return ()
    return range(math.ceil(low), math.floor(high) + 1)


def _containing(keys: Mapping[str, Any], schema: Any, fewest: int, most: float) -> list[dict[str, Any]]:
    """The keys of lists with `fewest` to `most` items of the schema, beside `keys`."""
    if fewest > most or (schema is False and fewest):
        return []
    if most == 0:
        return [{"items": negated_schema(schema)}]
    if schema is True or schema == {} or (alike(keys.get("items"), schema) and not keys.get("prefixItems")):
        return [{"minItems": fewest} | ({} if most == math.inf else {"maxItems": int(most)})]
    if fewest == 0 and most == math.inf:
        return [{}]
    if fewest == 1 and most == math.inf and keys.get("maxItems", math.inf) <= _MAX_POSITIONS:
        return [{"minItems": i + 1, "prefixItems": (True,) * i + (schema,)} for i in range(keys["maxItems"])]
    num_first = len(keys.get("prefixItems", ()))
    if num_first and not (fewest == 1 and most == math.inf):
        raise Unsaid
    in_prefix = [{"minItems": i + 1, "prefixItems": (True,) * i + (schema,)} for i in range(num_first)]
    return [*in_prefix, {"minItems": num_first + fewest, "contains": ((schema, fewest, most),)}]


def _contained(keys: Mapping[str, Any]) -> dict[str, Any]:
    """`contains` for `schema_rules`, for items that follow `items` too. It is a list, which no client's schema has there.

    Where `maxContains` limits their number, `items` is the schema of the others.
    """
    ((schema, fewest, most), *more) = keys["contains"]
    if more or "uniqueItems" in keys:
        raise Unsaid
    items = keys.get("items", True)
    if items is False or (contained := both(items, schema)) is False:
        raise Unsaid
    part = {"contains": [contained], "minContains": fewest}
    return part if most == math.inf else part | {"maxContains": int(most), "items": both(items, negated_schema(schema))}


def _property(keys: Mapping[str, Any], name: str) -> Any:
    """The schema of a property of this name."""
    found = [each for pattern, each in keys.get("patternProperties", {}).items() if matches(pattern, name)]
    if name in keys.get("properties", {}):
        found.append(keys["properties"][name])
    return reduce(both, found or [keys.get("additionalProperties", True)], True)


def _regex(keys: Mapping[str, Any]) -> str:
    """A regular expression of the texts that have no other constraints than the keys."""
    if keys.keys() == {"pattern"} and len(keys["pattern"]) == 1:
        return f"(?:{keys['pattern'][0]})"
    if keys.keys() == {"enum"}:
        return f"^(?:{'|'.join(map(re.escape, keys['enum']))})$"
    if keys.keys() <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{keys.get('minLength', 0)},{keys.get('maxLength', '')}}}$"
    raise Unsaid


def _none_of(texts: Sequence[str]) -> str:
    """A regular expression of all texts but these."""

    def others(texts: Sequence[str]) -> str:
        nexts = sorted({text[0] for text in texts if text})
        heads = "".join(f"\\x{{{ord(char):x}}}" for char in nexts)
        parts = [f"[^{heads}][\\s\\S]*" if nexts else "[\\s\\S]+"]
        parts += [f"\\x{{{ord(char):x}}}{others([text[1:] for text in texts if text[:1] == char])}" for char in nexts]
        return f"(?:{'|'.join(parts)}){'' if '' in texts else '?'}"

    if sum(map(len, texts)) > _MAX_NAMES:
        raise Unsaid
    return f"^{others(texts)}$"
