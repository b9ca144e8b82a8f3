"""Schemas that have no form that llguidance follows are refused, with the place of what has none."""

import json
from typing import Any

import pytest

from llama_core.errors import InvalidParameter
from llama_core.text.grammar import checked_grammar, json_schema_grammar
from llama_core.text.tools.schema_grammar import compiled_schema
from tests.support.schema_forms import CAT, DRAFT_7, DRAFT_2019, NUMBER, TEXT, A, B


@pytest.mark.parametrize("schema", [
    {"type": "array", "uniqueItems": True},
    {"type": "array", "items": {"type": ["string", "object"]}, "uniqueItems": True},
    {"type": "array", "items": {"type": "array", "items": TEXT}, "uniqueItems": True},
    {"type": "array", "prefixItems": [TEXT], "uniqueItems": True},
    {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "uniqueItems": True},
    {"type": "array", "contains": [A]},
    {"type": "array", "contains": A, "allOf": [{"contains": B}]},
    {"type": "array", "contains": {"pattern": "a"}, "maxContains": 1},
    {"type": "array", "contains": A, "minContains": 2, "prefixItems": [TEXT]},
    {"type": "array", "contains": {"type": "integer"}, "uniqueItems": True},
    {"type": "number", "not": {"type": "integer"}, "multipleOf": 0.5},
    {"type": "string", "not": {"pattern": "^a"}},
    {"oneOf": [TEXT, {"pattern": "a"}]},
    {"type": "object", "propertyNames": {"pattern": "^a", "maxLength": 3}},
    {"type": "object", "patternProperties": {"^a": NUMBER}, "not": {"patternProperties": {"^b": NUMBER}}},
    {"type": "object", "unevaluatedProperties": False, "$ref": "https://example.com/other"},
    {"not": {"dependencies": {"a": ["b"]}}},
    {"not": {}},
])  # fmt: skip
def test_what_has_no_form_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidParameter):
        checked_grammar(json_schema_grammar(schema), "schema")


@pytest.mark.parametrize("schema", [
    {"$schema": DRAFT_7, "$ref": "#/$defs/x", "minLength": 1, "$defs": {"x": TEXT | {"not": {"pattern": "a"}}}},
    {"type": "string", "format": {}},
    {"type": "object", "properties": {"a": ["b"]}, "patternProperties": {"a": {}}, "propertyNames": {"enum": ["a"]}},
    {"type": "object", "dependentSchemas": {"a": ["b"]}},
    {"type": "object", "dependentRequired": {"a": True}},
    {"properties": {"n": {"type": "integer", "enum": [10**400, 1], "not": {"const": 2}}}},
    {"$schema": DRAFT_2019, "properties": {"a": {"$recursiveRef": "#", "not": {"type": "null"}}}},
    {"$ref": "#/$defs/a", "$dynamicRef": "#b", "$defs": {"a": {"type": "object"}, "b": {"$dynamicAnchor": "b"}}},
    {"properties": {"p": {"$ref": "http://x/i"}}, "not": {"type": "null"}, "$defs": {
        "z": TEXT, "i": {"$id": "http://x/i", "foo": {"$ref": "#/$defs/z"}, "$defs": {"z": NUMBER}, "$ref": "#/foo"}}},
])  # fmt: skip
def test_a_schema_that_is_malformed_or_cannot_be_told_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidParameter):
        checked_grammar(json_schema_grammar(schema), "schema")
    with pytest.raises(InvalidParameter):
        compiled_schema(json.dumps(schema), True)


@pytest.mark.parametrize(("schema", "place"), [
    ({"properties": {"a": {"dependentRequired": {"x": ["y"]}}, "b": {"type": "array", "uniqueItems": True}}},
     ".properties[1].uniqueItems"),
    ({"oneOf": [CAT | {"properties": CAT["properties"] | {"s": {"type": "array", "uniqueItems": True}}}, {"type": "null"}],
      "not": {"type": "string"}}, ".oneOf[0].properties[2].uniqueItems"),
    ({"allOf": [{"if": {"properties": {"a": A}}, "then": {"required": ["b"]}}, {"not": {"pattern": "a"}}]}, ".allOf[1].not"),
    ({"properties": {"a": {"not": {"type": "null"}}, "b": {"$ref": "https://x/y"}}}, ".properties[1].$ref"),
    ({"properties": {"a": {"not": {"type": "null"}}, "b": {"pattern": "(?!a)b"}}}, ".properties[1].pattern"),
    ({"items": {"type": "string", "format": "color"}, "maxItems": 1.0, "not": {"pattern": "a"}}, ".not"),
])  # fmt: skip
def test_an_error_names_the_place_of_what_has_no_form(schema: Any, place: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        checked_grammar(json_schema_grammar(schema), "json")
    assert refused.value.param == f"json{place}"
    with pytest.raises(InvalidParameter) as refused:
        compiled_schema(json.dumps(schema), True)
    assert refused.value.param == place
