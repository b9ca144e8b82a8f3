"""The keywords of one JSON schema, by draft, and as terms where they apply no other schema in place."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from llama_core.text.schema_forms.references import Unsaid
from llama_core.text.schema_forms.terms import KINDS, NOTHING, Seen, Term, kind_of
from llama_core.text.schema_parts import listed

KNOWN_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)


_FIRST_DRAFT: Final = {
    "const": 6, "contains": 6, "propertyNames": 6, "if": 7, "then": 7, "else": 7, "minContains": 2019, "maxContains": 2019,
    "dependentRequired": 2019, "dependentSchemas": 2019, "unevaluatedProperties": 2019, "unevaluatedItems": 2019,
    "prefixItems": 2020, "$dynamicRef": 2020,
}  # fmt: skip


_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


_LIMITS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def known_keywords(schema: Mapping[str, Any], draft: int) -> dict[str, Any]:
    """The schema in the words of the draft 2020-12: without keywords that its own draft lacks, and with integers as counts."""
    if draft <= 7 and "$ref" in schema:
        return {"$ref": schema["$ref"]}
    known = {key: value for key, value in schema.items() if _FIRST_DRAFT.get(key, 0) <= draft}
    for key in _COUNTS:
        if isinstance(value := known.get(key), float) and value.is_integer():
            known[key] = int(value)
    if known.get("format") not in KNOWN_FORMATS:
        known.pop("format", None)
    if isinstance(known.get("items"), list):
        known |= {"prefixItems": known.pop("items"), "items": known.get("additionalItems", True)}
    known.pop("additionalItems", None)
    for limit, own in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(known.get(own), bool) and known.pop(own) and limit in known:
            known[own] = known[limit]
    return known


def own_terms(known: Mapping[str, Any]) -> Iterator[Term]:
    """The terms of the keywords that apply no schema in place."""
    types = listed(known.get("type", list(KINDS)))
    values = known.get("enum", [known["const"]] if "const" in known else None)
    if ("enum" in known and "const" in known) or not set(types) <= {*KINDS, "integer"}:
        raise Unsaid
    for kind in KINDS:
        if kind not in types and not (kind == "number" and "integer" in types):
            continue
        keys = dict(_OWN[kind](known))
        if kind == "number" and "number" not in types:
            keys["integer"] = True
        if values is not None:
            keys["enum"] = tuple(value for value in values if kind_of(value) == kind)
        yield Term(kind, keys, _seen(kind, known))


def _seen(kind: str, known: Mapping[str, Any]) -> Seen:
    if kind == "object":
        names, patterns = frozenset(known.get("properties", ())), frozenset(known.get("patternProperties", ()))
        return Seen(names, patterns, "additionalProperties" in known)
    if kind == "array":
        contained = (known["contains"],) if "contains" in known else ()
        return Seen(num_items=math.inf if "items" in known else len(known.get("prefixItems", ())), contained=contained)
    return NOTHING


_Keys = Iterator[tuple[str, Any]]


def _copied(known: Mapping[str, Any], *keys: str) -> _Keys:
    for key in keys:
        if key in known:
            if isinstance(known[key], bool) or not isinstance(known[key], int | float):
                raise Unsaid
            yield key, known[key]


def _number_keys(known: Mapping[str, Any]) -> _Keys:
    yield from _copied(known, *_LIMITS)
    if "multipleOf" in known:
        yield "multipleOf", (known["multipleOf"],)


def _string_keys(known: Mapping[str, Any]) -> _Keys:
    yield from _copied(known, "minLength", "maxLength")
    yield from ((key, (known[key],)) for key in ("pattern", "format") if key in known)


def _array_keys(known: Mapping[str, Any]) -> _Keys:
    yield from _copied(known, "minItems", "maxItems")
    if "prefixItems" in known:
        yield "prefixItems", tuple(known["prefixItems"])
    if "items" in known:
        yield "items", known["items"]
    if known.get("uniqueItems"):
        yield "uniqueItems", True
    if "contains" in known:
        limits = dict(_copied(known, "minContains", "maxContains"))
        yield "contains", ((known["contains"], limits.get("minContains", 1), limits.get("maxContains", math.inf)),)


def _object_keys(known: Mapping[str, Any]) -> _Keys:
    yield from _copied(known, "minProperties", "maxProperties")
    yield from ((key, dict(known[key])) for key in ("properties", "patternProperties") if key in known)
    if "additionalProperties" in known:
        yield "additionalProperties", known["additionalProperties"]
    if isinstance(known.get("required"), list):  # draft 3 has true and false
        yield "required", tuple(dict.fromkeys(known["required"]))
    if "propertyNames" in known:
        yield "propertyNames", (known["propertyNames"],)


_OWN: Final[dict[str, Callable[[Mapping[str, Any]], _Keys]]] = {
    "null": lambda _: iter(()),
    "boolean": lambda _: iter(()),
    "number": _number_keys,
    "string": _string_keys,
    "array": _array_keys,
    "object": _object_keys,
}
