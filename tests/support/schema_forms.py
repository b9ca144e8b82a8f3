"""Schemas that llguidance refuses as they are, with values that follow them and values that do not."""

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from llama_core.text.grammar import checked_grammar, json_schema_grammar, limits

BYTES = LLTokenizer("byte")
DRAFT_7, DRAFT_2019 = "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2019-09/schema"


def matcher_of(schema: Any) -> LLMatcher:
    """Of a schema that llguidance refuses by itself."""
    given = json_schema_grammar(schema)
    assert LLMatcher.validate_grammar(given, limits=limits()), "llguidance follows the schema as it is"
    matcher = LLMatcher(BYTES, checked_grammar(given, "schema"), log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def follows(matcher: LLMatcher, text: str) -> bool:
    copy, raw = matcher.deep_copy(), list(text.encode())
    return copy.try_consume_tokens(raw) == len(raw) and copy.is_accepting()


A, B = {"const": "a"}, {"const": "b"}
TEXT, NUMBER = {"type": "string"}, {"type": "number"}

CAT: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "claws": {"type": "integer"}},
    "required": ["kind"],
}
DOG = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}, "owner": {"$ref": "#/$defs/cat"}},
    "required": ["kind"],
}
BY_KIND: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "x": {"type": "integer"}},
    "required": ["kind"],
}
OPEN_OBJECT = {"type": "object", "properties": {"a": TEXT}}

# Schemas, and values of which the first follow them and the others do not.
FORMS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "an unknown format is an annotation": ({"type": "string", "format": "color"}, ["#fff", ""], [1]),
    "a count is a float": ({"type": "array", "items": {"type": "null"}, "maxItems": 2.0}, [[], [None] * 2], [[None] * 3]),
    "names of an enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        [{}, {"b": 2}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}, []],
    ),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "integer"}},
        [{}, {"x": 1, "xy": 2}],
        [{"a": 1}, {"x": "y"}],
    ),
    "names of a length": (
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}, "additionalProperties": {"type": "integer"}},
        [{}, {"ab": 1, "é\n\"": 2}],
        [{"a": 1}, {"abcd": 1}],
    ),
    "names beside properties": (
        {"type": "object", "properties": {"a": TEXT, "c": TEXT}, "propertyNames": {"enum": ["a", "b"]}, "required": ["a"]},
        [{"a": "x"}, {"a": "x", "b": [1]}],
        [{"b": 1}, {"a": "x", "c": "x"}],
    ),
    "a property needs another": (
        {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "dependentRequired": {"a": ["b"]}},
        [{}, {"b": "y"}, {"a": "x", "b": "y"}],
        [{"a": "x"}, {"a": "x", "c": 1}],
    ),
    "a property needs another, in draft 7": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "dependencies": {"a": ["b"]}},
        [{}, {"b": "y"}, {"a": "x", "b": "y"}],
        [{"a": "x"}],
    ),
    "a property needs a schema": (
        {"type": "object", "dependentSchemas": {"a": {"properties": {"b": NUMBER}}}},
        [{}, {"b": "y"}, {"a": "x", "b": 1}],
        [{"a": "x", "b": "y"}],
    ),
    "nothing is unevaluated": (OPEN_OBJECT | {"unevaluatedProperties": False}, [{}, {"a": "x"}], [{"b": 1}, {"a": 1}]),
    "nothing is unevaluated beside allOf and a reference": (
        {"allOf": [OPEN_OBJECT, {"$ref": "#/$defs/b"}], "unevaluatedProperties": False, "type": "object",
         "$defs": {"b": {"properties": {"b": NUMBER}, "required": ["b"]}}},
        [{"b": 1}, {"a": "x", "b": 1}],
        [{}, {"a": "x"}, {"b": 1, "c": 1}],
    ),
    "what is evaluated depends on the alternatives": (
        {"type": "object", "anyOf": [{"properties": {"a": A}, "required": ["a"]}, {"properties": {"b": B}, "required": ["b"]}],
         "unevaluatedProperties": False},
        [{"a": "a"}, {"b": "b"}, {"a": "a", "b": "b"}],
        [{}, {"a": "a", "b": "c"}, {"a": "a", "c": 1}],
    ),
    "no item is unevaluated": (
        {"type": "array", "prefixItems": [TEXT, NUMBER], "unevaluatedItems": False}, [[], ["x"], ["x", 1]], [[1], ["x", 1, 2]]
    ),
    "a set": (
        {"type": "array", "items": {"enum": ["a", "b", 1, True]}, "uniqueItems": True},
        [[], ["b"], ["a", "b"], ["a", 1, True], ["a", "b", 1, True]],
        [["a", "a"], ["b", "a", "b"], ["c"], [1, 1], [False]],
    ),
    "a set of some size": (
        {"type": "array", "items": {"$ref": "#/$defs/e"}, "uniqueItems": True, "minItems": 2, "maxItems": 3,
         "$defs": {"e": {"enum": ["a", "b", "c", "d"]}}},
        [["a", "b"], ["b", "d"], ["a", "c", "d"]],
        [[], ["a"], ["b", "b"], ["a", "b", "c", "d"]],
    ),
    "a set of booleans": (
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, [[], [False, True]], [[True] * 2]
    ),
    "a set of integers": (
        {"type": "array", "items": {"type": "integer", "exclusiveMinimum": 2.5, "maximum": 5}, "uniqueItems": True},
        [[], [3], [3, 5], [3, 4, 5]],
        [[2], [6], [3, 3], [3.5]],
    ),
    "one item is unique": ({"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 1}, [[], ["x"]], [["x", "y"]]),
    "a short list contains something": (
        {"type": "array", "contains": A, "maxItems": 2}, [["a"], ["b", "a"], ["a", 1]], [[], ["b"], [1, 2, "a"]]
    ),
    "a list contains something": (
        {"type": "array", "contains": A}, [["a"], ["a", 1], ["a", "b", {}], ["a", "a"]], [[], ["b"], [["a"], 1, 2]]
    ),
    "a list contains two": (
        {"type": "array", "items": TEXT, "contains": A, "minContains": 2},
        [["a", "a"], ["a", "a", "b"], ["a", "a", "a"]],
        [[], ["a"], ["b", "a"], ["a", "a", 1]],
    ),
    "a list contains one to two among some": (
        {"type": "array", "items": {"enum": ["a", "b", 1]}, "contains": A, "maxContains": 2, "minItems": 3, "maxItems": 4},
        [["a", "b", 1], ["a", "a", 1], ["a", "a", "b", 1], ["a", 1, 1, "a"]],
        [["a", "b"], ["b", 1, 1], ["a", "a", "a"], ["a", "b", 1, 1, 1], ["a", "b", 2]],
    ),
    "a list contains none or one": (
        {"type": "array", "contains": A, "minContains": 0, "maxContains": 1}, [[], ["a"], [1, "a", 2], ["b"]], [["a", 1, "a"]]
    ),
    "a list of three contains one": (
        {"type": "array", "contains": A, "minItems": 3}, [["a", 1, 2], ["a", 1, 2, 3], ["a"] * 3], [["a"], ["a", 1], [1, 2, 3]]
    ),
    "a list contains something behind its first items or there": (
        {"type": "array", "prefixItems": [TEXT, NUMBER], "contains": A},
        [["a"], ["b", 1, "a"], ["a", 1], ["b", 1, "a", 2]],
        [[], ["b"], ["b", 1], ["b", "a"], [1, "a"]],
    ),
    "a list contains what is evaluated": (
        {"type": "array", "prefixItems": [True], "contains": TEXT, "unevaluatedItems": False},
        [[1, "x"], ["x"], ["x", "y"], [1, "x", "y"]],
        [[], [1], ["x", 1], [1, "x", 2]],
    ),
    "a list contains multiples": (
        {"type": "array", "items": {"multipleOf": 2}, "contains": {"multipleOf": 3}}, [[6], [12, 2]], [[2], [3], []]
    ),
    "numbers that are no integers": ({"not": {"type": "integer"}}, [1.5, -0.25, "1", None, [1]], [1, -2, 0, 10]),
    "an integer or a large number": (
        {"oneOf": [{"type": "integer"}, {"minimum": 2}], "type": "number"}, [1, 2.5, 3.25, -4], [2, 3, 1.5]
    ),
    "a list contains nothing of the kind": ({"type": "array", "not": {"contains": A}}, [[], ["b", 1]], [["b", "a"]]),
    "discriminated references": (
        {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG}},
        [{"kind": "cat", "claws": 1}, {"kind": "dog", "owner": {"kind": "cat"}}],
        [{"kind": "cow"}, {}, {"kind": "cat", "claws": "x"}, {"kind": "dog", "owner": {"kind": "dog"}}],
    ),
    "exactly one of several": (
        {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 1, "c": 2}],
        [{}, {"a": 1, "b": 1}],
    ),
    "numbers of either side": (
        {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, [2, 6], [3, 5, 2.5]
    ),
    "not null": ({"type": ["string", "null"], "not": {"type": "null"}}, ["x"], [None, 1]),
    "no word of an enum": (
        {"type": "string", "not": {"enum": ["foo", "fab", ""]}}, ["f", "fo", "fooo", 'x"\n'], ["foo", "fab", "", 1]
    ),
    "another number": ({"type": "integer", "not": {"const": 3}}, [2, 4, -3], [3, 2.5]),
    "true is not 1": ({"allOf": [{"enum": [1, "a"]}, {"not": {"enum": [True, "a"]}}]}, [1], [True, "a"]),
    "without a property": ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
    "if a property has a value": (
        BY_KIND | {"if": {"properties": {"kind": A}}, "then": {"required": ["x"]}, "else": {"properties": {"x": False}}},
        [{"kind": "a", "x": 1}, {"kind": "b"}],
        [{"kind": "a"}, {"kind": "b", "x": 1}, {"x": 1}],
    ),
    "if several": (
        BY_KIND | {"allOf": [{"if": {"properties": {"kind": A}}, "then": {"required": ["x"]}},
                             {"if": {"properties": {"kind": B}}, "then": {"required": ["y"]}}]},
        [{"kind": "a", "x": 1}, {"kind": "b", "y": 1}],
        [{"kind": "a", "y": 1}, {"kind": "b", "x": 1}],
    ),
    "a tree": (
        {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "unevaluatedProperties": False,
                                              "properties": {"k": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}}},
        [{}, {"k": [{}, {"k": []}]}],
        [{"x": 1}, {"k": [{"x": 1}]}],
    ),
    "a reference to a place": (
        {"type": "object", "properties": {"a": {"type": "string", "not": A}, "b": {"$ref": "#/properties/a"}}},
        [{"a": "x", "b": "y"}],
        [{"a": "a"}, {"b": "a"}],
    ),
    "a reference to an inner resource": (
        {"$id": "http://x/root", "properties": {"a": {"$ref": "item#n"}}, "not": {"type": "null"},
         "$defs": {"i": {"$id": "item", "$defs": {"n": {"$anchor": "n", "type": "integer"}}}}},
        [{"a": 1}, "x"],
        [{"a": "x"}, None],
    ),
}  # fmt: skip
