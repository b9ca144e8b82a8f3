"""A JSON schema that is refused is refused with the innermost place at fault, in words that repeat nothing of it."""

from collections.abc import Callable
from typing import Any

import pytest

from llama_core.errors import InvalidParameter
from llama_core.text import schema_candidates, schema_faults
from llama_core.text.grammar import checked_grammar, json_schema_grammar
from tests.support.faulty_schemas import CONTEXTS, CONTRADICTIONS, FAULTS, MARK, NEEDED, place_and_reason


@pytest.fixture(autouse=True)
def _has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy does not end a search."""
    monkeypatch.setattr(schema_faults, "_MAX_SECONDS", 60)


@pytest.mark.parametrize(("schema", "place", "reason"), [*FAULTS, *CONTRADICTIONS])
def test_a_fault_is_named_by_its_place_and_reason(schema: Any, place: str, reason: str) -> None:
    if schema is not False:  # as a whole it is written otherwise
        found = place_and_reason(schema)
        assert found[0] == place and found[1].startswith(reason), found
    found = place_and_reason({"allOf": [schema]})
    assert found[0] == f".allOf[0]{place}" and found[1].startswith(reason), found


@pytest.mark.parametrize(("wrap", "outer"), CONTEXTS)
def test_the_place_of_a_fault_leads_through_the_schemas_around_it(
    wrap: Callable[[Any], dict[str, Any]], outer: str
) -> None:
    for schema, place, reason in FAULTS:
        found = place_and_reason(wrap(schema))
        assert found[0] == outer + place and found[1].startswith(reason), (schema, found)


@pytest.mark.parametrize(("wrap", "outer"), NEEDED)
def test_a_contradiction_is_named_where_a_value_is_needed(wrap: Callable[[Any], dict[str, Any]], outer: str) -> None:
    for schema, place, reason in CONTRADICTIONS:
        found = place_and_reason(wrap(schema))
        assert found[0] == outer + place and found[1].startswith(reason), (schema, found)


def test_a_fault_several_levels_deep_has_the_whole_path() -> None:
    schema: Any = {"type": "array", "uniqueItems": True}
    expected = ".uniqueItems"
    for wrap, outer in (each for each in CONTEXTS if ".$defs" not in each[1] and ".definitions" not in each[1]):
        schema, expected = wrap(schema), outer + expected
    assert place_and_reason(schema)[0] == expected


def test_an_optional_part_that_no_value_satisfies_is_not_named_for_another() -> None:
    never = {"type": "number", "minimum": 3, "maximum": 1}
    schema = {
        "type": "object",
        "properties": {"a": never, "b": {"type": "array", "items": never}, "c": {"allOf": [{"type": "null"}, never]}},
        "required": ["c"],
    }
    assert place_and_reason(schema) == (".properties[2].allOf[1].minimum", "is greater than maximum")


def test_properties_constants_and_notes_named_like_keywords_are_none() -> None:
    names = ["uniqueItems", "not", "$ref", "pattern", "type", "properties"]
    plain = {
        "type": "object",
        "properties": {name: {"type": "string", "default": {"uniqueItems": True}} for name in names},
        "required": names,
    }
    checked_grammar(json_schema_grammar(plain), "json")
    plain["properties"]["last"] = {"const": {"not": 1, "$ref": "x", "type": 5}}  # type: ignore[index]
    checked_grammar(json_schema_grammar(plain), "json")
    plain["properties"]["last"] = {"examples": [{"uniqueItems": 1}], "uniqueItems": True}  # type: ignore[index]
    assert place_and_reason(plain)[0] == ".properties[6].uniqueItems"


def test_a_reference_that_leads_by_an_unknown_key_is_named_with_what_it_leads_to() -> None:
    schema = {"properties": {"a": {"$ref": f"#/{MARK}/b"}}, MARK: {"b": {"items": {"type": MARK}}}}
    assert place_and_reason(schema)[0] == ".properties[0].$ref.items.type"


def test_alternatives_that_overlap_are_named_within_others_that_do_not() -> None:
    overlapping = {"oneOf": [{"type": "string", "pattern": each} for each in "ab"]}
    apart = {"oneOf": [{"type": "null"}, {"type": "array", "items": overlapping}]}
    schema = {"oneOf": [{"type": "string"}, {"type": "array", "items": apart}]}
    assert place_and_reason(schema)[0] == ".oneOf[1].items.oneOf[1].items.oneOf"


def test_a_reference_to_a_schema_around_it_is_not_named_for_a_fault_of_that() -> None:
    both = {"allOf": [{"type": "string"}, {"type": "integer"}]}
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}, "b": both}, "required": ["a", "b"]}
    assert place_and_reason(schema)[0] == ".properties[1]"


def test_a_fault_of_no_known_keyword_is_found_beside_parts_that_contradict_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(schema_candidates._CANDIDATES, "oneOf")
    schema = {"properties": {"a": {"enum": []}, "b": {"items": {"oneOf": [{"pattern": each} for each in "ab"]}}}}
    assert place_and_reason(schema) == (
        ".properties[1].items",
        "alternatives of oneOf that may overlap are not supported: use anyOf",
    )


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "$dynamicAnchor"),
        (
            {
                "$id": f"https://{MARK}.org/root",
                "$ref": "list",
                "$defs": {"list": {"$id": "list", "items": {"$dynamicRef": "#items"}, "$defs": {"items": {}}}},
            },
            "$dynamicRef",
        ),
    ],
    ids=["a draft's own schema", "a part with an $id"],
)
def test_a_keyword_of_another_resource_is_named_without_a_place(schema: Any, keyword: str) -> None:
    assert place_and_reason(schema) == ("", f"the keyword {keyword} is not supported")


def test_a_part_that_is_too_large_is_named() -> None:
    objects = [[{"type": "object", "properties": {f"a{i}{j}": {}}} for i in range(40)] for j in range(4)]
    schema = {"properties": {"a": {}, "b": {"items": {"allOf": [{"anyOf": each} for each in objects]}}}}
    assert place_and_reason(schema) == (".properties[1].items", "is too large or too complex")


def test_a_schema_that_refers_to_itself_beside_other_keywords_is_named() -> None:
    node = {"properties": {"x": {"$ref": "#/$defs/A", "type": "object"}}}
    schema = {"properties": {"a": {}, "b": {"$ref": "#/$defs/A", "minProperties": 1}}, "$defs": {"A": node}}
    assert place_and_reason(schema)[0] == ".properties[1].$ref"


def test_an_external_reference_is_refused_where_something_leads_to_it() -> None:
    definitions = {"a": {}, "b": {"$ref": "x.json"}}
    checked_grammar(json_schema_grammar({"type": "null", "$defs": definitions}), "json")
    assert place_and_reason({"$ref": "#/$defs/b", "$defs": definitions})[0] == ".$defs[1].$ref"


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"$schema": f"https://{MARK}/", "type": "null"}, ".$schema", "must name a draft of JSON schema"),
        ({"$id": f"https://[{MARK}", "type": "null"}, ".$id", "is not a valid URI reference"),
        ({"x-guidance": {MARK: 1}}, ".x-guidance", "has an option that does not exist"),
        # Draft 6 has no "if".
        ({"$schema": "http://json-schema.org/draft-06/schema#", "if": {}, "properties": {"a": {"not": {"pattern": "x"}}}},
         ".properties[0].not", "the keyword not"),
    ],
)  # fmt: skip
def test_a_fault_of_the_whole_is_named(schema: Any, place: str, reason: str) -> None:
    found = place_and_reason(schema)
    assert found[0] == place and found[1].startswith(reason), found


@pytest.mark.parametrize(
    ("schema", "place", "reason"),
    [
        ({"type": "number", "minimum": float("inf")}, ".minimum", "must be a finite number"),
        ({"items": {"const": float("nan")}}, ".items.const", "must be a finite number"),
        ({"items": {"type": "integer", "multipleOf": -7}}, ".items.multipleOf", "must be greater than 0"),
        ({"anyOf": [{"multipleOf": 7}, {"multipleOf": -0.5}]}, ".anyOf[1].multipleOf", "must be greater than 0"),
        ({"const": "\ud800"}, "", "must be JSON, without lone surrogates and with finite numbers"),
    ],
)
def test_a_schema_that_is_no_json_is_refused_before_it_is_compiled(schema: Any, place: str, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason) as refused:
        json_schema_grammar(schema)
    assert refused.value.param == place


def test_what_looks_like_a_negative_multiple_is_none() -> None:
    for schema in ({"const": {"multipleOf": -7}}, {"properties": {"multipleOf": {"const": -7}}}, {"multipleOf": 7}):
        checked_grammar(json_schema_grammar(schema), "json")


@pytest.mark.parametrize("levels", [124, 125, 128, 2000])
def test_a_schema_that_is_nested_too_deep_is_refused_with_the_limit(levels: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(levels - 1):
        schema = {"items": schema}
    if levels == 124:
        checked_grammar(json_schema_grammar(schema), "json")
        return
    with pytest.raises(InvalidParameter, match="may be nested 124 levels deep at most"):
        checked_grammar(json_schema_grammar(schema), "json")
