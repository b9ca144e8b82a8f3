"""The keywords of a JSON schema that may cause a refusal by llguidance, for each kind of fault.

`schema_faults` compiles each of them alone to find out whether it does.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from llama_core.text.grammar_words import RegexFault
from llama_core.text.schema_places import (
    KEYWORDS,
    NAMED_SCHEMAS,
    SCHEMA_LISTS,
    TYPES,
    UNSUPPORTED,
    SchemaTree,
    types_of,
)

DRAFTS: Final = re.compile(r"https?://json-schema\.org/draft(/20(19-09|20-12)|-0[467])/schema#?")
_FORMATS: Final = "date, date-time, duration, email, hostname, ipv4, ipv6, time, unknown, uri, uuid"
# Keywords that may contradict each other in one schema, but for those of objects.
_OWN: Final = frozenset(
    {"type", "enum", "const", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
     "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)  # fmt: skip
_COUNT: Final = "must be a whole number of at least 0"


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_limit(value: Any) -> bool:
    return isinstance(value, bool) or _is_number(value)  # draft 4 has true and false


# The type of value that a keyword describes, whether the keyword's own value is right, and what it must be.
_VALUES: Final[Mapping[str, tuple[str | None, Callable[[Any], bool], str]]] = {
    "$ref": (None, _is_text, "must be a string"),
    **dict.fromkeys(("enum", "anyOf", "oneOf", "allOf", "prefixItems"), (None, _is_list, "must be a list")),
    "properties": (None, _is_object, "must be an object"),
    "patternProperties": ("object", _is_object, "must be an object"),
    "required": ("object", _is_names, "must be a list of strings"),
    **dict.fromkeys(("minProperties", "maxProperties"), ("object", _is_count, _COUNT)),
    **dict.fromkeys(("minItems", "maxItems"), ("array", _is_count, _COUNT)),
    **dict.fromkeys(("minLength", "maxLength"), ("string", _is_count, _COUNT)),
    **dict.fromkeys(("pattern", "format"), ("string", _is_text, "must be a string")),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), ("number", _is_number, "must be a number")),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), ("number", _is_limit, "must be a number")),
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A keyword that may be at fault. place: within the schema that has it. alone: a schema with this keyword, and without
    other faults of this kind. reason: what the error says if `alone` is refused; "" where llguidance's own words tell."""

    place: str
    alone: dict[str, Any]
    reason: str


def candidates(kind: str, schema: Any, tree: SchemaTree) -> Iterator[Candidate]:
    """Of one schema within `tree`, for a kind of fault in `_CANDIDATES`; none for other kinds."""
    if isinstance(schema, dict) and kind in _CANDIDATES:
        yield from _CANDIDATES[kind](schema, tree)


def _of_keywords(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    for key in sorted(schema.keys() & UNSUPPORTED):
        yield Candidate(f".{key}", {key: True}, f"the keyword {key} is not supported")


def _of_type(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    named = schema.get("type", [])
    for i, each in enumerate(named) if isinstance(named, list) else ():
        if each not in TYPES:
            yield Candidate(f".type[{i}]", {"type": [each]}, f"must be one of {', '.join(TYPES)}")
    if not isinstance(named, list) and named not in TYPES:
        yield Candidate(".type", {"type": named}, f"must be one of {', '.join(TYPES)}, or a list of them")


def _of_reference(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    reference, draft = schema.get("$ref"), schema.get("$schema")
    if isinstance(reference, str) and tree.target(reference) is None:
        if not reference.startswith("#"):
            reason = "must name a part of the same schema, as #/$defs/NAME does"
            yield Candidate(".$ref", {"$ref": reference}, reason)
        elif reference.startswith("#/") or not _has_anchor(tree.root, reference[1:]):
            yield Candidate(".$ref", {"$ref": reference}, "names no part of the schema")
    if isinstance(draft, str) and not DRAFTS.fullmatch(draft):
        yield Candidate(".$schema", {"$schema": draft}, "must name a draft of JSON schema from 4 to 2020-12")


def _has_anchor(root: Any, name: str) -> bool:
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if name in (value.get("$anchor"), value.get("$dynamicAnchor")):
                return True
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False


def _of_uri(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    for key in ("$ref", "$id", "$schema"):
        if isinstance(schema.get(key), str):
            yield Candidate(f".{key}", {key: schema[key]}, "is not a valid URI reference")


def _of_regex(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    types, patterns = types_of(schema), schema.get("patternProperties")
    if "string" in types and isinstance(schema.get("pattern"), str):
        alone = {"type": "string", "pattern": schema["pattern"]}
        yield Candidate(".pattern", alone, RegexFault(None, "").reason)
    for i, name in enumerate(patterns if "object" in types and isinstance(patterns, dict) else ()):
        alone = {"type": "object", "patternProperties": {name: True}}
        yield Candidate(
            f".patternProperties[{i}]", alone, "has a name that is not a regular expression that can be followed"
        )
    for key in ("minLength", "maxLength"):
        if "string" in types and _is_count(schema.get(key)) and schema[key] >= 2**32:
            yield Candidate(f".{key}", {"type": "string", key: schema[key]}, f"must be less than {2**32}")


def _of_format(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    if isinstance(schema.get("format"), str) and "string" in types_of(schema):
        alone = {"type": "string", "format": schema["format"]}
        yield Candidate(".format", alone, f"this format is not supported; supported are {_FORMATS}")


def _of_values(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    types = types_of(schema)
    for key, value in schema.items():
        if key in _VALUES:
            kind, is_right, reason = _VALUES[key]
            if not is_right(value) and (kind is None or kind in types or (kind == "number" and "integer" in types)):
                yield Candidate(f".{key}", {key: value} | ({} if kind is None else {"type": kind}), reason)


def _of_counts(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    limits: dict[str, Any] = {key: schema[key] for key in ("minProperties", "maxProperties") if key in schema}
    if limits and "object" in types_of(schema):
        properties = schema.get("properties")
        alone = {key: schema[key] for key in ("required",) if key in schema} | limits
        alone |= {"type": "object", "additionalProperties": schema.get("additionalProperties") is not False}
        alone["properties"] = dict.fromkeys(properties if isinstance(properties, dict) else (), True)
        yield Candidate(f".{next(iter(limits))}", alone, "is supported only where all properties are required")


def _of_overlap(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    if isinstance(patterns := schema.get("patternProperties"), dict):
        alone = {"type": "object", "patternProperties": dict.fromkeys(patterns, True)}
        yield Candidate(".patternProperties", alone, "its expressions must exclude each other")


def _of_multiple(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    if "multipleOf" in schema:
        alone = {"type": "number", "multipleOf": schema["multipleOf"]}
        yield Candidate(".multipleOf", alone, "must be greater than 0, and have few digits")


def _of_pattern(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    if "pattern" in schema:
        kept = {key: schema[key] for key in ("pattern", "format", "minLength", "maxLength") if key in schema}
        yield Candidate(".pattern", {"type": "string"} | kept, "is too complex beside the limits of the text's length")


def _of_one_of(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    if isinstance(schema.get("oneOf"), list):
        kept = KEYWORDS - {"$ref", "$defs", "definitions"}
        alone = {key: _without_one_of(value, key) for key, value in schema.items() if key in kept}
        yield Candidate(".oneOf", alone, "alternatives that may overlap are not supported: use anyOf")


def _without_one_of(value: Any, key: str) -> Any:
    """The value of a schema's keyword, with anyOf for each oneOf in it, and any value for each reference: alternatives that
    are references always count as overlapping."""

    def relaxed(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        kept = {
            key: each for key, each in schema.items() if key in KEYWORDS and key not in ("$ref", "$defs", "definitions")
        }
        if "oneOf" in kept:
            kept["anyOf"] = kept.pop("oneOf")
        return {key: _without_one_of(each, key) for key, each in kept.items()}

    if key in NAMED_SCHEMAS and isinstance(value, dict):
        return {name: relaxed(each) for name, each in value.items()}
    if key in (*SCHEMA_LISTS, "prefixItems", "items") and isinstance(value, list):
        return [relaxed(each) for each in value]
    return relaxed(value) if key in ("items", "additionalItems", "additionalProperties") else value


def _of_contradiction(schema: dict[str, Any], tree: SchemaTree) -> Iterator[Candidate]:
    own = {key: value for key, value in schema.items() if key in _OWN}
    own |= {key: [] for key in SCHEMA_LISTS if schema.get(key) == []}
    if own.keys() - {"type"}:
        yield Candidate("", own, "")
    if types_of(schema) == {"object"}:
        yield from _of_object(schema)


def _of_object(schema: dict[str, Any]) -> Iterator[Candidate]:
    properties, required = schema.get("properties"), schema.get("required")
    names = dict.fromkeys(properties, True) if isinstance(properties, dict) else {}
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    counts = {key: schema[key] for key in ("minProperties", "maxProperties", "required") if key in schema}
    if counts.keys() - {"required"}:
        yield Candidate("", counts | {"type": "object", "properties": names, "additionalProperties": not is_closed}, "")
    missing = [name for name in required or [] if name not in names] if is_closed and _is_names(required) else []
    if missing:
        yield Candidate("", {"type": "object", "required": missing, "additionalProperties": False}, "")


_CANDIDATES: Final[dict[str, Callable[[dict[str, Any], SchemaTree], Iterator[Candidate]]]] = {
    "keyword": _of_keywords,
    "type": _of_type,
    "reference": _of_reference,
    "uri": _of_uri,
    "regex": _of_regex,
    "format": _of_format,
    "value": _of_values,
    "contradiction": _of_contradiction,
    "oneOf": _of_one_of,
    "counts": _of_counts,
    "overlap": _of_overlap,
    "multiple": _of_multiple,
    "undecided": _of_pattern,
}
