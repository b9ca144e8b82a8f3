"""Objects of a schema that names their properties have no others, however the schema is composed."""

import json
import time
from typing import Any

import pytest
from llguidance import LLMatcher

from llama_core.grammar.build import json_schema_grammar
from llama_core.grammar.check import byte_vocabulary, checked
from llama_core.grammar.closed_objects import closed_objects

CAT = {"type": "object", "properties": {"meow": {"type": "integer"}}, "required": ["meow"]}
DOG = {"type": "object", "properties": {"woof": {"type": "integer"}}, "required": ["woof"]}
PETS = {"$defs": {"Cat": CAT, "Dog": DOG}}
X = {"x": {"type": "integer"}}
Y = {"y": {"type": "integer"}}


def follows(schema: dict[str, Any], value: Any) -> bool:
    text = json.dumps(value, separators=(",", ":")).encode()
    matcher = LLMatcher(byte_vocabulary(), checked(json_schema_grammar(schema), "field"), log_level=0)
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"properties": X}, [{}, {"x": 1}, "no object"], [{"x": 1, "z": 1}, {"z": 1}]),
        ({"type": "object", "properties": {}}, [{}], [{"z": 1}]),
        ({"type": "object"}, [{}, {"z": {"z": 1}}], []),
        ({"type": "object", "required": ["x"]}, [{"x": 1, "z": 1}], [{}]),
        ({"properties": X, "required": ["x", "a"]}, [{"x": 1, "a": [1]}], [{"x": 1}, {"x": 1, "a": 1, "z": 1}]),
        ({"properties": {"o": {"properties": X}}}, [{"o": {"x": 1}}], [{"o": {"z": 1}}]),
        ({"type": "array", "items": {"properties": X}}, [[{"x": 1}]], [[{"z": 1}]]),
        ({"additionalProperties": {"type": "object", "properties": X}}, [{"z": {"x": 1}}], [{"z": {"z": 1}}]),
        ({"properties": X, "additionalProperties": True}, [{"x": 1, "z": 1}], []),
        ({"properties": X, "patternProperties": {"^z": {}}}, [{"x": 1, "z": 1}, {"x": 1, "a": 1}], []),
        (PETS | {"properties": {"p": {"$ref": "#/$defs/Cat"}}}, [{"p": {"meow": 1}}], [{"p": {"meow": 1, "z": 1}}]),
        (PETS | {"$ref": "#/$defs/Cat"}, [{"meow": 1}], [{"meow": 1, "z": 1}]),
        (PETS | {"allOf": [{"$ref": "#/$defs/Cat"}, {"properties": X}]}, [{"meow": 1, "x": 1}], [{"meow": 1, "z": 1}]),
        (PETS | {"$ref": "#/$defs/Cat", "properties": X}, [{"meow": 1, "x": 1}], [{"meow": 1, "x": 1, "z": 1}, {"x": 1}]),
        (PETS | {"allOf": [{"$ref": "#/$defs/Cat"}], "properties": {"c": {"$ref": "#/$defs/Cat"}}},
         [{"meow": 1, "c": {"meow": 1}}], [{"meow": 1, "c": {"meow": 1, "c": 1}}]),
        (PETS | {"anyOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}, {"type": "null"}]},
         [{"meow": 1}, {"woof": 1}, None], [{"meow": 1, "woof": 1}, {"meow": 1, "z": 1}]),
        (PETS | {"properties": X, "anyOf": [{"$ref": "#/$defs/Cat"}, DOG]},
         [{"x": 1, "meow": 1}, {"x": 1, "woof": 1}], [{"x": 1, "meow": 1, "woof": 1}, {"x": 1}, {"meow": 1, "z": 1}]),
        ({"properties": X, "anyOf": [{"properties": Y}, {"properties": {}, "additionalProperties": True}]},
         [{"x": 1, "y": 1}, {"x": 1, "z": 1}], []),
        ({"properties": X | Y, "anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
         [{"x": 1}, {"y": 1}], [{}, {"x": 1, "z": 1}]),
        ({"anyOf": [{"properties": X}], "oneOf": [{"properties": Y, "required": ["y"]}]},
         [{"x": 1, "y": 1}], [{"x": 1, "y": 1, "z": 1}]),
        ({"allOf": [{"properties": X, "additionalProperties": True}, {"properties": Y}]}, [{"x": 1, "y": 1, "z": 1}], []),
        ({"properties": {"next": {"$ref": "#"}}}, [{"next": {"next": {}}}], [{"next": {"z": 1}}]),
        ({"properties": {"a": {"properties": X}, "b": {"$ref": "#/properties/a"}}}, [{"b": {"x": 1}}], [{"b": {"z": 1}}]),
        ({"properties": {"a/b": {"properties": X}}, "allOf": [{"$ref": "#/properties/a~1b"}]}, [{"x": 1}], [{"z": 1}]),
        ({"$defs": {"a": {"$anchor": "A", "properties": X}}, "allOf": [{"$ref": "#A"}], "properties": Y},
         [{"x": 1, "y": 1}, {"y": 1, "z": 1}], []),
        ({"properties": {"properties": {"properties": X}}}, [{"properties": {"x": 1}}], [{"properties": {"z": 1}}, {"x": 1}]),
    ],
)  # fmt: skip
def test_an_object_has_the_properties_that_its_schemas_name(
    schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    assert [value for value in right if not follows(schema, value)] == []
    assert [value for value in wrong if follows(schema, value)] == []


def test_properties_of_a_condition_are_among_those_that_an_object_may_have() -> None:
    """llguidance follows no condition, and ignores those of tools that are not strict."""
    schema = {"properties": X, "if": {"properties": X}, "then": {"properties": Y}, "else": CAT}
    closed = closed_objects(schema)
    assert closed["additionalProperties"] is False and list(closed["properties"]) == ["x", "y", "meow"]


def test_the_order_of_properties_stays_that_of_the_schema() -> None:
    schema = PETS | {"properties": Y, "allOf": [{"$ref": "#/$defs/Cat"}, {"properties": X}]}
    assert follows(schema, {"y": 1, "meow": 1, "x": 1}) and not follows(schema, {"meow": 1, "y": 1, "x": 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": None, "required": 3, "allOf": "x", "anyOf": {"a": 1}, "$ref": 5, "dependencies": [], "if": 1},
        {"properties": X, "required": None},
        {"properties": X, "allOf": [{"$ref": "#/$defs/none/0"}, 5]},
        {"anyOf": [{"$ref": "#"}], "properties": X, "oneOf": [{"anyOf": [{"$ref": "#"}]}]},
        {"properties": X, "allOf": [{"$ref": "#/allOf/7"}]},
        {"$defs": None, "allOf": [{"$ref": "#/definitions/x"}], "definitions": {"x": {}}, "properties": X},
        {"$defs": [{"properties": X}], "allOf": [{"$ref": "#/$defs/0"}]},
    ],
)
def test_a_schema_that_is_invalid_or_refers_to_itself_is_left_to_the_grammar(schema: Any) -> None:
    assert isinstance(closed_objects(schema), dict)


def test_a_schema_that_takes_long_to_close_stays_open_and_one_that_is_read_often_counts_by_its_size() -> None:
    big: dict[str, Any] = {"properties": {f"property_{i}": {} for i in range(1000)}}
    wide = {
        "$defs": {"Big": big},
        "properties": {str(i): {"$ref": "#/$defs/Big", "properties": X} for i in range(3000)},
    }
    chain: dict[str, Any] = {"$ref": "#/$defs/0", "properties": X}
    chain["$defs"] = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(4000)} | {"4000": {}}
    parts = [{"$ref": "#/$defs/target", "properties": {}} for _ in range(700)]
    targets = (
        {f"{i:x}": 0 for i in range(3000)},
        {"required": [list(range(10_000))]},
        {"$ref": "#/$defs/" + "%61" * 6000},
    )
    begin_s = time.thread_time()
    assert closed_objects(wide) == wide and closed_objects(chain)["$defs"]
    for target in targets:
        closed_objects({"properties": {"x": {"prefixItems": parts}}, "$defs": {"target": target, "a" * 6000: {}}})
    assert time.thread_time() - begin_s < 4


def test_a_closed_schema_repeats_neither_long_names_nor_what_references_spell_in_many_ways() -> None:
    spelled = [{"$ref": "#/$defs/" + f"{i:09b}".replace("0", "%62").replace("1", "b")} for i in range(500)]
    for schema in (
        {"properties": {"n" * 30_000: X}, "anyOf": [{"properties": {}} for _ in range(1000)]},
        {"properties": {}, "allOf": spelled, "$defs": {"b" * 9: {"properties": X, "description": "d" * 25_000}}},
    ):
        assert len(json.dumps(closed_objects(schema))) < 2 * len(json.dumps(schema))
