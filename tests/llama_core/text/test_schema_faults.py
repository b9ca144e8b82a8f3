"""A JSON schema that is refused is refused with the innermost place at fault, in words that repeat nothing of it."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_core.errors import InvalidParameter
from llama_core.text import grammar as grammars
from llama_core.text import schema_candidates, schema_faults
from llama_core.text.grammar import checked_grammar, json_schema_grammar
from llama_core.text.schema_faults import schema_fault

MARK = "Zq7Marker"
TYPES = "must be one of array, boolean, integer, null, number, object, string"

REGEX = "is not a regular expression that can be followed"


@pytest.fixture(autouse=True)
def _has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy does not end a search."""
    monkeypatch.setattr(schema_faults, "_MAX_SECONDS", 60)


def refusal(schema: Any) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as refused:
        checked_grammar(json_schema_grammar(schema), "json")
    assert refused.value.message.startswith(f"{refused.value.param}: ")
    return refused.value


def place_and_reason(schema: Any) -> tuple[str, str]:
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
        ({"const": "\ud800"}, "", "must be JSON, without lone surrogates and with finite numbers"),
    ],
)
def test_a_schema_that_is_no_json_is_refused_before_it_is_compiled(schema: Any, place: str, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=reason) as refused:
        json_schema_grammar(schema)
    assert refused.value.param == place


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

    def counted(grammar: str) -> str:
        sizes.append(len(grammar))
        return problem_of(grammar)

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
