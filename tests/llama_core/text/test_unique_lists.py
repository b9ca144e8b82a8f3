"""Lists with unique items whose values are not listed: the grammar marks them, and their items stay distinct at run time."""

import json
from typing import Any
from unittest.mock import Mock

import pytest

from llama_core.errors import InvalidParameter
from llama_core.text.grammar import checked_grammar, for_answer, json_schema_grammar, schema_of, unique_lists_of
from tests.support.schema_forms import TEXT

SPACED = Mock(leading_space="drop")
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
