"""Rewritten schemas take the texts that follow the schema as it was given, by jsonschema's verdict, and no others."""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from llama_core.errors import InvalidParameter
from llama_core.execution.grammars.item_text import UniqueLists
from llama_core.execution.grammars.json_vocabulary import JsonVocabulary
from llama_core.execution.grammars.unique_items import ItemTokens, UniqueItems
from llama_core.text.grammar import checked_grammar, json_schema_grammar, limits, schema_of, unique_lists_of
from llama_core.text.schema_forms.rewriting import rewritten
from llama_core.text.tools.schema_grammar import compiled_schema
from tests.support.schema_forms import BYTES, DRAFT_2019, FORMS, NUMBER, TEXT, A, follows, matcher_of
from tests.support.schema_keywords import instances, random_answer, schemas

ITEMS = ItemTokens(JsonVocabulary(BYTES, -(-BYTES.vocab_size // 32)))


def unique_items_of(schema: Any) -> UniqueItems | None:
    """What keeps the items of the schema's lists distinct, over the tokenizer of bytes."""
    lists = unique_lists_of(checked_grammar(json_schema_grammar(schema), "schema"))
    return None if lists is None else UniqueItems.of(ITEMS, UniqueLists(lists))


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


def test_a_schema_that_llguidance_follows_stays_as_it_is() -> None:
    schema = {"type": "object", "properties": {"a": TEXT}, "title": "x"}
    assert schema.items() <= schema_of(checked_grammar(json_schema_grammar(schema), "schema")).items()


def test_numbers_of_a_form_have_a_limited_length() -> None:
    schema = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "dependentRequired": {"a": ["b"]}}
    matcher = matcher_of(schema)
    assert follows(matcher, '{"a":1.5,"b":2}') and not follows(matcher, f'{{"a":1.{"5" * 23},"b":2}}')


def test_a_schema_that_ends_a_circle_within_another_is_followed_by_itself() -> None:
    """While "node" is written, "rest" cannot be."""
    members = {"v": {"type": "integer"}, "rest": {"allOf": [{"$ref": "#/$defs/rest"}]}}
    node = {"type": "object", "properties": members, "required": ["v", "rest"], "unevaluatedProperties": False}
    rest = {"oneOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    matcher = matcher_of({"$ref": "#/$defs/node", "$defs": {"node": node, "rest": rest}})
    assert follows(matcher, '{"v":1,"rest":{"v":2,"rest":null}}') and not follows(matcher, '{"v":1,"rest":{"w":2}}')


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
@pytest.mark.timeout(60)
def test_rewriting_ends_soon(name: str) -> None:
    found = rewritten(LARGE[name])
    assert found is None or len(json.dumps(found)) < 10_000 + 4 * len(json.dumps(LARGE[name]))
