"""The keywords of one JSON schema, by draft, and as terms where they apply no other schema in place."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from llama_core.text.schema_forms.references import SCHEMAS_BY_NAME, SINGLE_SCHEMAS, Unsaid
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


COUNTS: Final = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"
)  # fmt: skip


_TYPES: Final = frozenset({*KINDS, "integer"})
_LIMITS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, bool | dict)


def _has_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _has_names(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_names, value.values()))


def _has_dependencies(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_schema(each) or _is_names(each) for each in value.values())


def _is_of_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


_IS_PROPER: Final[Mapping[str, Callable[[Any], bool]]] = {
    "type": lambda value: all(isinstance(each, str) and each in _TYPES for each in listed(value)),
    "enum": lambda value: isinstance(value, list),
    "required": _is_names,
    **dict.fromkeys(("pattern", "format", "$ref", "$dynamicRef"), lambda value: isinstance(value, str)),
    **dict.fromkeys(COUNTS, _is_count),
    **dict.fromkeys((*_LIMITS, "multipleOf"), _is_number),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _is_of_schemas),
    **dict.fromkeys(SCHEMAS_BY_NAME, _has_schemas),
    "dependencies": _has_dependencies,
    "dependentRequired": _has_names,
    **dict.fromkeys(SINGLE_SCHEMAS, _is_schema),
}


def known_keywords(schema: Mapping[str, Any], draft: int) -> dict[str, Any]:
    """The schema in the words of the draft 2020-12: without keywords that its own draft lacks, and with integers as counts.

    Raises Unsaid where a keyword has a value that it cannot have, and for references that depend on how a schema is reached.
    """
    if "$recursiveRef" in schema or {"$ref", "$dynamicRef"} <= schema.keys():
        raise Unsaid
    if draft <= 7 and "$ref" in schema:
        return {"$ref": schema["$ref"]}
    known = {key: value for key, value in schema.items() if _FIRST_DRAFT.get(key, 0) <= draft}
    for key in COUNTS:
        if isinstance(value := known.get(key), float) and value.is_integer():
            known[key] = int(value)
    if known.get("format") not in KNOWN_FORMATS:
        known.pop("format", None)
    if isinstance(known.get("items"), list):
        known["prefixItems"] = known.pop("items")
        if "additionalItems" in known:  # without it, the items behind are not evaluated
            known["items"] = known["additionalItems"]
    known.pop("additionalItems", None)
    if draft > 7:
        known.pop("dependencies", None)  # which these drafts do not have
    for limit, own in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(known.get(own), bool) and known.pop(own) and limit in known:
            known[own] = known[limit]
    if not all(_IS_PROPER[key](value) for key, value in known.items() if key in _IS_PROPER):
        raise Unsaid
    return known


def own_terms(known: Mapping[str, Any]) -> Iterator[Term]:
    """The terms of the keywords that apply no schema in place."""
    types = listed(known.get("type", list(KINDS)))
    values = known.get("enum", [known["const"]] if "const" in known else None)
    if "enum" in known and "const" in known:
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
    if "required" in known:
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
