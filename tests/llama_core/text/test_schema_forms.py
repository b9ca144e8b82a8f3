"""Rewritten schemas take the texts that follow the schema as it was given, by jsonschema's verdict, and no others."""

import itertools
import json
import random
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from llama_core.errors import InvalidParameter
from llama_core.execution.grammars.item_text import UniqueLists
from llama_core.execution.grammars.json_vocabulary import JsonVocabulary
from llama_core.execution.grammars.unique_items import ItemTokens, UniqueItems
from llama_core.text.grammar import checked_grammar, for_answer, json_schema_grammar, limits, schema_of, unique_lists_of
from llama_core.text.schema_forms.rewriting import rewritten
from llama_core.text.tools.schema_grammar import compiled_schema
from tests.support.schema_keywords import instances, random_answer, schemas

BYTES = LLTokenizer("byte")
ITEMS = ItemTokens(JsonVocabulary(BYTES, -(-BYTES.vocab_size // 32)))
SPACED = Mock(leading_space="drop")


def matcher_of(schema: Any) -> LLMatcher:
    """Of a schema that llguidance refuses by itself."""
    given = json_schema_grammar(schema)
    assert LLMatcher.validate_grammar(given, limits=limits()), "llguidance follows the schema as it is"
    matcher = LLMatcher(BYTES, checked_grammar(given, "schema"), log_level=0, limits=limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def unique_items_of(schema: Any) -> UniqueItems | None:
    """What keeps the items of the schema's lists distinct, over the tokenizer of bytes."""
    lists = unique_lists_of(checked_grammar(json_schema_grammar(schema), "schema"))
    return None if lists is None else UniqueItems.of(ITEMS, UniqueLists(lists))


def follows(matcher: LLMatcher, text: str) -> bool:
    copy, raw = matcher.deep_copy(), list(text.encode())
    return copy.try_consume_tokens(raw) == len(raw) and copy.is_accepting()


def texts(value: Any) -> Iterator[str]:
    """JSON of the value, with its keys in every order."""
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for parts in itertools.product(*(list(texts(value[name])) for name in names)):
                keys = [json.dumps(name, ensure_ascii=False) for name in names]
                yield "{" + ",".join(f"{key}:{part}" for key, part in zip(keys, parts, strict=True)) + "}"
    elif isinstance(value, list):
        yield from (f"[{','.join(parts)}]" for parts in itertools.product(*map(texts, value)))
    else:
        yield json.dumps(value, ensure_ascii=False)


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


@pytest.mark.parametrize("name", FORMS)
def test_a_form_takes_the_values_of_its_schema(name: str) -> None:
    schema, valid, invalid = FORMS[name]
    arguments = LLMatcher.grammar_from_lark(f"start: {compiled_schema(json.dumps(schema), False)}")
    matchers = (matcher_of(schema), LLMatcher(BYTES, arguments, log_level=0, limits=limits()))
    verdict = jsonschema.validators.validator_for(schema)(schema)
    for value in valid:
        assert verdict.is_valid(value)
        assert all(any(follows(matcher, text) for text in texts(value)) for matcher in matchers), value
    for value in invalid:
        assert not verdict.is_valid(value)
        assert not any(follows(matcher, text) for text in texts(value) for matcher in matchers), value


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(schemas(), st.lists(instances(), min_size=12, max_size=12), st.integers(0, 10_000))
def test_answers_to_random_schemas_follow_the_schema_as_given(schema: Any, values: list[Any], seed: int) -> None:
    if not LLMatcher.validate_grammar(json_schema_grammar(schema), limits=limits()):
        return
    try:
        matcher = matcher_of(schema)
    except InvalidParameter:
        return
    unique = unique_items_of(schema)
    verdict = jsonschema.Draft202012Validator(schema)
    for value in values:
        if not verdict.is_valid(value):
            raw = list(json.dumps(value).encode())
            assert not follows(matcher, json.dumps(value)) or (unique and unique.distinct(raw) != raw), (value, schema)
    for _ in range(2):
        if (answer := random_answer(matcher, random.Random(seed), 120, unique)) is not None:
            assert verdict.is_valid(json.loads(answer)), (answer, schema)


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


NAMES = {"type": "array", "items": TEXT, "uniqueItems": True}
SET_STATE = {"is_unique": True}


@pytest.mark.parametrize(("schema", "states"), [
    pytest.param(NAMES, [SET_STATE], id="a list"),
    pytest.param(NAMES | {"items": {"type": ["string", "null"]}}, [SET_STATE], id="several types"),
    pytest.param(NAMES | {"items": {"anyOf": [TEXT, {"type": "null"}]}}, [SET_STATE], id="alternatives"),
    pytest.param(NAMES | {"items": {"$ref": "#/$defs/n"}, "$defs": {"n": TEXT}}, [SET_STATE], id="a reference"),
    pytest.param(NAMES | {"items": {"type": "integer"}}, [SET_STATE | {"may_run_out": 1}], id="integers"),
    pytest.param(NAMES | {"items": {"type": "string", "maxLength": 3}}, [SET_STATE | {"may_run_out": 1}], id="short"),
    pytest.param(
        {"type": "object", "properties": {"a": TEXT, "b": NAMES}}, [{"names": {"b": [1]}}, SET_STATE], id="a property"
    ),
    pytest.param(
        {"type": "object", "properties": {"a": TEXT}, "additionalProperties": NAMES},
        [{"names": {"a": []}, "others": [1]}, SET_STATE],
        id="other names",
    ),
    pytest.param({"type": "array", "items": NAMES}, [{"items": [1]}, SET_STATE], id="lists of them"),
    pytest.param(
        {"type": "array", "prefixItems": [NAMES, TEXT], "items": NAMES},
        [{"items": [2], "first": [[1], []]}, SET_STATE, SET_STATE],
        id="the first items",
    ),
    pytest.param({"anyOf": [NAMES, {"type": "null"}]}, [SET_STATE], id="an optional one"),
])  # fmt: skip
def test_a_list_of_values_that_are_not_listed_is_kept_unique_at_run_time(schema: Any, states: list[Any]) -> None:
    grammar = checked_grammar(json_schema_grammar(schema), "schema")
    found = unique_lists_of(grammar)
    assert found["states"] == states
    assert "uniqueItems" not in json.dumps(schema_of(grammar))
    assert unique_lists_of(for_answer(grammar, SPACED)) == found
    with pytest.raises(InvalidParameter):
        checked_grammar(json_schema_grammar(schema), "schema", is_whole=False)


def test_a_tree_of_lists_that_are_kept_unique_has_as_many_states_as_kinds_of_nodes() -> None:
    node = {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}, "b": NAMES}}
    schema = {"$ref": "#/$defs/t", "$defs": {"t": node}}
    found = unique_lists_of(checked_grammar(json_schema_grammar(schema), "schema"))
    [root] = found["root"]
    assert found["states"][root]["names"]["a"] == [root] and len(found["states"]) <= 3


def test_a_set_of_an_enum_that_rules_would_be_too_many_for_is_kept_unique_at_run_time() -> None:
    values = [f"v{i}" for i in range(100)]
    grammar = checked_grammar(
        json_schema_grammar(NAMES | {"items": {"enum": values}, "maxItems": 500, "minItems": 20}), "g"
    )
    assert unique_lists_of(grammar)["states"] == [SET_STATE | {"may_run_out": 2}]
    assert schema_of(grammar)["maxItems"] == 100
    assert unique_lists_of(checked_grammar(json_schema_grammar(NAMES | {"items": {"enum": values}}), "g")) is None


def test_an_alternative_with_lists_leaves_their_number_small() -> None:
    """Each place of a schema is one state, however many ways lead there."""
    schema: Any = NAMES
    for _ in range(5):
        schema = {"type": "object", "properties": {"a": schema, "b": schema}}
    found = unique_lists_of(checked_grammar(json_schema_grammar(schema), "schema"))
    assert len(found["states"]) <= 2**6


DRAFT_7, DRAFT_2019 = "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2019-09/schema"


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


@pytest.mark.parametrize(("schema", "text"), [
    ({"$schema": DRAFT_2019, "type": "array", "items": [{"type": "null"}], "unevaluatedItems": False}, "[null,1]"),
    # `dependencies` is no keyword of the draft 2020-12.
    ({"type": "object", "oneOf": [{"dependencies": {"a": ["b"]}}, {"required": ["a"]}]}, '{"a":1}'),
    ({"type": "object", "properties": {"a": True}, "dependencies": {"a": {"properties": {"b": True}}},
      "unevaluatedProperties": False}, '{"a":1,"b":1}'),
])  # fmt: skip
def test_a_form_keeps_to_the_draft_of_its_schema(schema: Any, text: str) -> None:
    assert not follows(matcher_of(schema), text)


def test_parts_that_are_used_twice_count_twice() -> None:
    """Each level has the one within it twice, so that the written schema would double with each."""
    schema: Any = TEXT
    for _ in range(40):
        schema = {"type": "object", "properties": {"k": schema}, "dependentRequired": {"a": ["b"]}}
    assert rewritten(schema) is None


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


def test_a_schema_that_llguidance_follows_stays_as_it_is() -> None:
    schema = {"type": "object", "properties": {"a": TEXT}, "title": "x"}
    assert schema.items() <= schema_of(checked_grammar(json_schema_grammar(schema), "schema")).items()


def test_numbers_of_a_form_have_a_limited_length() -> None:
    schema = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "dependentRequired": {"a": ["b"]}}
    matcher = matcher_of(schema)
    assert follows(matcher, '{"a":1.5,"b":2}') and not follows(matcher, f'{{"a":1.{"5" * 23},"b":2}}')


LARGE: dict[str, Any] = {
    "nested not": {"$defs": {"a": {"properties": {"a": {"not": {"$ref": "#/$defs/a"}}}}}, "not": {"$ref": "#/$defs/a"}},
    "circle": {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}], "not": {"$ref": "#/$defs/a"}}}},
    "product": {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(30)], "not": A},
    "wide": {"oneOf": [{"properties": {f"p{i}": {"minimum": i}}} for i in range(80)]},
    "trees": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "unevaluatedProperties": False,
              "$defs": {name: {"properties": {"x": {"$ref": f"#/$defs/{name}"}}} for name in "ab"}},
    "many cases": {"allOf": [{"if": {"properties": {"k": {"const": i}}}, "then": {"required": [f"r{i}"]}} for i in range(200)]},
    "deep": {"not": {"type": "null"}},
    "long words": {"type": "string", "not": {"enum": ["x" * 300]}},
}  # fmt: skip
for _ in range(200):
    LARGE["deep"] = {"properties": {"a": LARGE["deep"]}}


@pytest.mark.parametrize("name", LARGE)
def test_rewriting_ends_soon(name: str) -> None:
    begun = time.thread_time()
    found = rewritten(LARGE[name])
    assert time.thread_time() - begun < 0.5
    assert found is None or len(json.dumps(found)) < 10_000 + 4 * len(json.dumps(LARGE[name]))
