"""Schemas that are refused, with the place and the reason that the error names, and ways to nest them."""

from collections.abc import Callable
from typing import Any

import pytest

from llama_core.errors import InvalidParameter
from llama_core.text.grammar import checked_grammar, json_schema_grammar

MARK = "Zq7Marker"
TYPES = "must be one of array, boolean, integer, null, number, object, string"
REGEX = "is not a regular expression that can be followed"


def refusal(schema: Any) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as refused:
        checked_grammar(json_schema_grammar(schema), "json")
    assert refused.value.message.startswith(f"{refused.value.param}: ")
    return refused.value


def place_and_reason(schema: Any) -> tuple[str, str]:
    """Of the schema's fault, as the error names them."""
    refused = refusal(schema)
    assert refused.param is not None
    return refused.param.removeprefix("json"), refused.message.removeprefix(f"{refused.param}: ")


# Schemas that are refused wherever they stand, the place in them, and how the reason begins.
FAULTS: list[tuple[Any, str, str]] = [
    ({"type": "array", "uniqueItems": True}, ".uniqueItems", "the keyword uniqueItems is not supported"),
    ({"type": "string", "not": {"pattern": MARK}}, ".not", "the keyword not is not supported"),
    ({"type": "array", "minItems": 2, "maxContains": 1, "contains": {"pattern": MARK}}, ".contains", "the keyword contains"),
    ({"type": MARK}, ".type", TYPES),
    ({"type": 5}, ".type", TYPES),
    ({"type": ["string", MARK]}, ".type[1]", TYPES),
    ({"$ref": f"#/$defs/{MARK}none"}, ".$ref", "names no part of the schema"),
    ({"$ref": f"#{MARK}"}, ".$ref", "names no part of the schema"),
    ({"$ref": f"https://{MARK}.org/"}, ".$ref", "must name a part of the same schema"),
    ({"$ref": [MARK]}, ".$ref", "must be a string"),
    ({"type": "string", "pattern": f"\\d/{MARK}("}, ".pattern", f"{REGEX} at character 13: unclosed group"),
    ({"type": "string", "pattern": f"(?={MARK})"}, ".pattern", f"{REGEX} at character 1: look-around"),
    ({"type": "string", "pattern": f"\\b{MARK}"}, ".pattern", f"{REGEX}: a word boundary"),
    ({"type": "object", "patternProperties": {"a": {}, f"{MARK}[": {}}}, ".patternProperties[1]", "has a name that is not"),
    ({"type": "object", "patternProperties": {MARK: {}, ".": {}}}, ".patternProperties", "its expressions must exclude"),
    ({"type": "string", "minLength": MARK}, ".minLength", "must be a whole number of at least 0"),
    ({"type": "array", "maxItems": -1}, ".maxItems", "must be a whole number of at least 0"),
    ({"type": "string", "maxLength": 2**40}, ".maxLength", "must be less than 4294967296"),
    ({"type": "integer", "minimum": MARK}, ".minimum", "must be a number"),
    ({"type": "number", "multipleOf": 0}, ".multipleOf", "must be greater than 0"),
    ({"type": "object", "properties": [MARK]}, ".properties", "must be an object"),
    ({"type": "object", "required": [MARK, 3]}, ".required", "must be a list of strings"),
    ({"enum": MARK}, ".enum", "must be a list"),
    ({"anyOf": {MARK: 1}}, ".anyOf", "must be a list"),
    ({"items": [{}, MARK]}, ".items[1]", "must be a JSON schema"),
    ({"oneOf": [{"type": "string"}, {"pattern": MARK}]}, ".oneOf", "alternatives that may overlap are not supported"),
    ({"type": "object", "properties": {MARK: {}, "b": {}}, "minProperties": 1}, ".minProperties", "is supported only"),
    ({"type": "string", "pattern": f"{MARK}.*b", "minLength": 10**5}, ".pattern", "is too complex beside"),
]  # fmt: skip
# Schemas that no value satisfies.
CONTRADICTIONS: list[tuple[Any, str, str]] = [
    (False, "", "no value satisfies false"),
    ({"type": "number", "minimum": 3, "maximum": 1}, ".minimum", "is greater than maximum"),
    ({"type": "integer", "exclusiveMinimum": 3, "maximum": 3}, ".exclusiveMinimum", "is equal to maximum"),
    ({"type": "string", "minLength": 3, "maxLength": 1}, ".minLength", "is greater than maxLength"),
    ({"type": "array", "minItems": 3, "maxItems": 1}, ".minItems", "is greater than maxItems"),
    ({"type": "object", "minProperties": 3, "maxProperties": 1}, ".minProperties", "is greater than maxProperties"),
    ({"type": "object", "required": ["a", MARK], "maxProperties": 1}, ".required", "names more properties than maxProperties"),
    ({"type": "object", "properties": {"a": {}}, "required": ["a", MARK], "additionalProperties": False},
     ".required[1]", "names a property that additionalProperties forbids"),
    ({"enum": []}, ".enum", "must have an element"),
    ({"anyOf": []}, ".anyOf", "must have an element"),
    ({"type": "integer", "const": MARK}, "", "no value satisfies all of its keywords"),
    ({"type": "string", "pattern": f"{MARK}+", "maxLength": 2}, ".pattern", "no text satisfies it with"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "", "no value satisfies all of its keywords"),
]  # fmt: skip

# Ways in which a schema stands within another, with its place there. Names of the client are counted.
Context = tuple[Callable[[Any], dict[str, Any]], str]

NEEDED: list[Context] = [
    (lambda inner: {"type": "object", "properties": {MARK: {}, "not": inner}, "required": ["not"]}, ".properties[1]"),
    (lambda inner: {"type": "array", "items": inner, "minItems": 1}, ".items"),
    (lambda inner: {"type": "array", "prefixItems": [{"type": "null"}, inner], "minItems": 2}, ".prefixItems[1]"),
    (lambda inner: {"anyOf": [inner]}, ".anyOf[0]"),
    (lambda inner: {"allOf": [{"title": MARK}, inner]}, ".allOf[1]"),
    (lambda inner: {"$ref": "#/$defs/B", "$defs": {MARK: {"type": "null"}, "B": inner}}, ".$defs[1]"),
    (lambda inner: {"properties": {"a": {"$ref": "#/definitions/a~1b%25"}}, "definitions": {"a/b%": inner}}, ".definitions[0]"),
    (lambda inner: {"$ref": "#/$defs/tree", "$defs": {"leaf": inner, "tree": {"type": "object", "properties": {
        "left": {"$ref": "#/$defs/tree"}, "right": {"anyOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/leaf"}]}}}}},
     ".$defs[0]"),
]  # fmt: skip
CONTEXTS: list[Context] = [
    *NEEDED,
    (lambda inner: {"type": "object", "properties": {"uniqueItems": {}, "type": inner}}, ".properties[1]"),
    (lambda inner: {"type": "object", "additionalProperties": inner}, ".additionalProperties"),
    (lambda inner: {"type": "object", "patternProperties": {f"^{MARK}$": {}, "^b$": inner}}, ".patternProperties[1]"),
    (lambda inner: {"type": "array", "items": [{}, inner]}, ".items[1]"),
    (lambda inner: {"type": "array", "items": [{}], "additionalItems": inner}, ".additionalItems"),
    (lambda inner: {"anyOf": [{"type": "null"}, inner]}, ".anyOf[1]"),
]  # fmt: skip
