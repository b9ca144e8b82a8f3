"""How the fault of a schema is found: by small parts of it, within limits of time and size, if it does not compile."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_core.errors import InvalidParameter
from llama_core.text import grammar as grammars
from llama_core.text import schema_faults
from llama_core.text.grammar import checked_grammar, json_schema_grammar
from llama_core.text.schema_faults import schema_fault
from tests.support.faulty_schemas import CONTRADICTIONS, FAULTS, MARK, place_and_reason


@pytest.fixture(autouse=True)
def _has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy does not end a search."""
    monkeypatch.setattr(schema_faults, "_MAX_SECONDS", 60)


def large(num_properties: int, last: Any) -> dict[str, Any]:
    """A schema of 100 kB and more whose last property has a fault."""
    each = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "description": "d" * 60, "pattern": "^[a-z]{1,20}$"},
            "b": {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1},
        },
    }
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "value": {"type": "integer"}}}
    properties = {f"p{i}": each for i in range(num_properties)} | {"last": last}
    return {"type": "object", "properties": properties, "required": ["last"], "$defs": {"node": node}}


@pytest.mark.parametrize(("fault", "place", "reason"), [*FAULTS[::4], *CONTRADICTIONS[1:8:6]])
def test_a_fault_in_a_large_schema_is_found_without_compiling_it_again(fault: Any, place: str, reason: str) -> None:
    schema = large(500, {"type": "array", "items": fault, "minItems": 1})
    text = json.dumps(schema)
    assert len(text) > 100_000
    compiled: list[int] = []

    def problem_of(part: Any) -> str:
        compiled.append(len(json.dumps(part)))
        return grammars._problem(grammars._of_schema(part))

    problem = grammars._problem(grammars._of_schema(schema))
    found = schema_fault(json.loads(text), problem, problem_of)
    assert found.place == f".properties[500].items{place}" and found.reason.startswith(reason)
    assert sum(compiled) < 2000


def test_a_search_that_takes_too_long_names_an_outer_place(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"allOf": [{"type": "string"}, {"type": "integer"}]}
    schema = {"type": "object", "properties": {"a": both}, "required": ["a"]}
    assert place_and_reason(schema)[0] == ".properties[0]"
    monkeypatch.setattr(schema_faults, "_MAX_SECONDS", -1)
    assert place_and_reason(schema) == ("", "no value satisfies all of its keywords")
    assert place_and_reason({"items": FAULTS[0][0]}) == ("", "the keyword uniqueItems is not supported")


def test_what_is_compiled_to_find_a_fault_is_limited_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"allOf": [{"type": "string"}, {"type": "integer"}]}
    schema = large(40, both)
    schema["required"] = list(schema["properties"])
    assert place_and_reason(schema)[0] == ".properties[40]"
    monkeypatch.setattr(schema_faults, "_MAX_CHARS", 4000)
    sizes: list[int] = []
    problem_of = grammars._problem

    def counted(grammar: str, is_brief: bool = False) -> str:
        sizes.append(len(grammar))
        return problem_of(grammar, is_brief)

    monkeypatch.setattr(grammars, "_problem", counted)
    monkeypatch.setattr(grammars, "rewritten", lambda _, **_options: None)
    assert place_and_reason(schema)[0] == ".properties[40]"
    assert max(sizes[2:]) < 6000  # behind the whole, as it is and without the keywords that can be rewritten


def test_a_schema_that_compiles_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(grammars, "schema_fault")
    checked_grammar(json_schema_grammar({"type": "object", "properties": {"a": {"type": "number"}}}), "json")


NAMES = st.sampled_from(["a", f"{MARK}b", "uniqueItems", "$ref", "x/~y"])
LEAVES = st.one_of(
    st.sampled_from([{"type": "integer"}, {"const": MARK}, True, {"type": ["string", "null"]}, {"$ref": f"#/$defs/{MARK}"}]),
    st.sampled_from([schema for schema, _, _ in [*FAULTS, *CONTRADICTIONS]]),
)  # fmt: skip


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.builds(
        lambda properties, is_needed, rest: {
            "type": "object",
            "properties": properties,
            "required": list(properties) if is_needed else [],
            "additionalProperties": rest,
        },
        st.dictionaries(NAMES, inner, min_size=1, max_size=3),
        st.booleans(),
        inner,
    )
    arrays = st.builds(
        lambda items, first, fewest: {"type": "array", "items": items, "prefixItems": first, "minItems": fewest},
        inner,
        st.lists(inner, max_size=2),
        st.integers(0, 3),
    )
    composed = st.builds(
        lambda key, schemas: {key: schemas}, st.sampled_from(["anyOf", "allOf", "oneOf"]), st.lists(inner, max_size=3)
    )
    return st.one_of(objects, arrays, composed)


SCHEMAS = st.builds(
    lambda schema, definition: {"items": schema, "$defs": {"a": {}, MARK: definition}},
    st.recursive(LEAVES, _larger, max_leaves=12),
    LEAVES,
)


def _without(schema: Any, place: str) -> Any:
    """The schema without what is at `place`."""
    path = [key or int(index) for key, index in re.findall(r"\.([^.\[]+)|\[(\d+)\]", place)]
    schema = inner = json.loads(json.dumps(schema))
    for i, step in enumerate(path):
        key = list(inner)[step] if isinstance(inner, dict) and isinstance(step, int) else step
        if i < len(path) - 1:
            inner = inner[key]
        elif isinstance(inner, list) and path[i - 1] in ("type", "required"):
            del inner[key]
        elif key in ("items", "additionalProperties") or (isinstance(step, int) and path[i - 1] != "patternProperties"):
            inner[key] = True
        else:
            del inner[key]
    return schema


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SCHEMAS)
def test_without_the_places_that_errors_name_a_schema_is_accepted_and_no_error_repeats_it(schema: Any) -> None:
    for _ in range(40):
        refused = None
        try:
            checked_grammar(json_schema_grammar(schema), "json")
        except InvalidParameter as error:
            refused = error
        if refused is None:
            return
        assert MARK not in refused.message and MARK not in str(refused.param)
        place = str(refused.param).removeprefix("json")
        assert place, refused.message
        shorter = _without(schema, place)
        assert shorter != schema, place
        schema = shorter
    raise AssertionError(schema)
