"""Answers of JSON schemas come to their end before the limit, whatever tokens are sampled, and only there."""

import json
import random
import re
from string import ascii_letters
from typing import Any

import jsonschema
import pytest

from llama_core.execution.grammars.closing_path import Search
from llama_core.execution.grammars.json_vocabulary import JsonText
from llama_core.text.grammar import for_answer
from tests.programs.structured_output import bounded, unbounded
from tests.support.sampled_answers import (
    BIG,
    RED_OR_BLUE,
    SEEDS,
    TOKENIZER,
    VOCABULARY,
    Vocabulary,
    after,
    by_chance,
    grammar_of,
    lookahead_of,
    respelled,
    sampled,
)


@pytest.mark.parametrize("kind", ["bounded", "unbounded"])
def test_random_answers_end_and_validate(kind: str) -> None:
    num_shortened = 0
    for seed in range(2 * SEEDS):
        schema = (bounded if kind == "bounded" else unbounded)(random.Random(seed))
        limit = (160, 400)[seed % 2] if kind == "bounded" else (40, 64, 100)[seed % 3]
        tokens, has_ended, is_shortened = sampled(grammar_of(schema), limit, by_chance(seed))
        assert has_ended, (schema, TOKENIZER.decode(tokens))
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)
        num_shortened += is_shortened
    assert (num_shortened > SEEDS // 2) if kind == "unbounded" else (num_shortened < SEEDS)


def test_an_answer_far_from_its_limit_is_left_alone() -> None:
    for seed in range(SEEDS):
        grammar = grammar_of(bounded(random.Random(seed)))
        tokens, has_ended, _ = sampled(grammar, 4000, by_chance(seed))
        assert has_ended
        again, _, is_shortened = sampled(grammar, len(tokens) + 100, by_chance(seed))
        assert again == tokens and not is_shortened


def test_an_answer_that_cannot_end_in_time_is_left_alone() -> None:
    grammar = grammar_of({"const": "a text of more tokens than are left"})
    tokens, has_ended, is_shortened = sampled(grammar, 6, by_chance(0))
    assert len(tokens) == 6 and not has_ended and not is_shortened


@pytest.mark.parametrize(
    ("schema", "preferred"),
    [
        ({"type": "object", "properties": {"n": {"type": "number"}, "big": BIG}, "required": ["n"]}, (b",", b"1")),
        ({"type": "array", "items": {"anyOf": [{"type": "integer"}, BIG]}}, (b" {", b"{", b",{")),
        ({"type": "array", "items": {"enum": [chr(97 + i) + " long text" * 9 * (i % 13 > 0) for i in range(26)]}}, ()),
        ({"type": "array", "items": BIG}, (b'"},{"', b'"},{', b'"},')),
        ({"type": "object", "properties": {"id": {"type": "string", "pattern": "^(foo|barbar)+$"}}}, (b" ",)),
    ],
)
def test_what_a_token_opens_is_in_time(schema: Any, preferred: tuple[bytes, ...]) -> None:
    for seed in range(SEEDS):
        grammar = grammar_of(schema)
        tokens, has_ended, _ = sampled(grammar, 120 + seed, by_chance(seed, *preferred))
        assert has_ended, TOKENIZER.decode(tokens)
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)


def named(kind: str, **properties: Any) -> Any:
    properties = {"kind": {"const": kind}} | properties
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


LONG_OR_SHORT = {
    "anyOf": [named("a", **{f"f{i}": {"type": "boolean"} for i in range(12)}), named("bb", n={"type": "string"})]
}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        pytest.param({"type": "object", "properties": {"big": BIG}}, '{"big', id="a key that is dear beside free keys"),
        pytest.param(LONG_OR_SHORT, "", id="a choice of which the first path takes the longer one"),
        pytest.param(LONG_OR_SHORT, '{"kind":"bb","n":"', id="the shorter choice, taken by the model"),
        pytest.param(
            {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": -1}, "minItems": 3},
            "",
            id="negative numbers",
        ),
        pytest.param({"type": "array", "items": RED_OR_BLUE | {"minItems": 60}}, "[", id="an item of many values"),
    ],
)
def test_other_ways_than_the_first_are_found(schema: Any, text: str) -> None:
    limits_of_tokens = (300, 340, 380) if "[" in text else (30, 60, 90)
    for limit in limits_of_tokens:
        preferred = by_chance(limit, b"a", b",", b'["', b'","')
        tokens, has_ended, _ = sampled(grammar_of(schema), limit, after(text, preferred))
        assert has_ended, TOKENIZER.decode(tokens)
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)


def test_first_letters_of_keys_that_are_dear_are_not_guessed() -> None:
    """Each of them is followed to the limit before it is known to be late, which is done once for all that begin alike."""
    dear = dict.fromkeys(("kind", "kilo", "keep", "key_a", "knee", "story", "stone", "big", "bird", "cat"), BIG)
    properties = dear | {"tags": {"type": "string", "format": "uuid"}}
    schema = {"type": "object", "properties": properties, "required": ["tags"], "additionalProperties": False}
    begin = len(VOCABULARY.tokens('{"'))
    for seed, num_left in enumerate((90, 100, 110, 120)):
        choose = after('{"', by_chance(seed, b"k", b"key", b"st", b"b", b"c"))
        tokens, has_ended, _ = sampled(grammar_of(schema), begin + num_left, choose)
        assert has_ended, TOKENIZER.decode(tokens)


def test_the_closing_path_writes_no_spaces() -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": -1}, "minItems": 3}
    matcher = VOCABULARY.matcher(grammar_of(schema))
    path = Search(VOCABULARY.json, 256).path(matcher, JsonText())
    assert re.fullmatch(r"\[-\d,-\d,-\d\]", TOKENIZER.decode(path[:-1]))


NAMES = [a + b + (" the very long name of a place" * (ord(a) % 3 == 0)) for a in ascii_letters for b in "abcdef"]


@pytest.mark.parametrize(
    "value",
    [
        {"format": "email"},
        {"format": "uri"},
        {"format": "hostname"},
        {"format": "ipv6"},
        {"format": "duration"},
        {"pattern": r"^[a-z0-9._]+@[a-z]+\.com$"},
        {"pattern": "^[A-Z][a-z]+ [A-Z][a-z]+$"},
        {"pattern": r"^\+?[0-9 -]+ext$"},
        {"pattern": "^[0-9a-f]{32}$"},
        {
            "enum": [
                "a rather long text that nobody would choose in such a short answer, because it goes on and on",
                "z",
            ]
        },
    ],
    ids=str,
)
def test_strings_that_cannot_end_anywhere_end(value: Any) -> None:
    properties = {"v": {"type": "string"} | value, "note": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["v", "note"], "additionalProperties": False}
    for seed in range(4):
        tokens, has_ended, _ = sampled(grammar_of(schema), 60 + 30 * seed, by_chance(seed, b"a", b"b"))
        assert has_ended, TOKENIZER.decode(tokens)
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)


def test_values_of_a_long_enum_are_in_time() -> None:
    schema = {"type": "array", "items": {"enum": NAMES}}
    for seed in range(SEEDS):
        tokens, has_ended, _ = sampled(grammar_of(schema), 60 + seed, by_chance(seed, b",", b'","'))
        assert has_ended, TOKENIZER.decode(tokens)
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)


LONG_ENDS = ("", "очень длинное слово" * 3)


@pytest.mark.parametrize(
    "value",
    [
        {"enum": [chr(0x410 + i) + LONG_ENDS[i % 2] for i in range(48)]},
        {"pattern": "^([\u0080-\u00a0]|[\u00a1-\u00bf]x{30})$"},
    ],
    ids=["enum", "pattern"],
)
def test_a_byte_of_a_character_that_leads_to_a_long_value_is_late(value: Any) -> None:
    """Within the character, more bytes are allowed than most enums allow tokens."""
    schema = {"type": "array", "items": {"type": "string"} | value, "minItems": 1}
    ahead = lookahead_of(grammar_of(schema))
    for seed in range(SEEDS):
        tokens, has_ended, _ = sampled(grammar_of(schema), 24, by_chance(seed, b"\xd0", b"\xc2"), ahead)
        assert has_ended, TOKENIZER.decode(tokens)
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)


@pytest.mark.parametrize("spare", range(1, 5))
def test_an_answer_of_which_no_text_is_lost_is_not_shortened(spare: int) -> None:
    for schema in (
        {"const": "hello world"},
        {"type": "object", "properties": {"n": {"const": "x"}}, "required": ["n"]},
    ):
        grammar = grammar_of(schema | {"additionalProperties": False} if "type" in schema else schema)
        tokens, _, _ = sampled(grammar, 4000, min)
        again, has_ended, is_shortened = sampled(grammar, len(tokens) + spare, min)
        assert has_ended and not is_shortened and TOKENIZER.decode(again).split() == TOKENIZER.decode(tokens).split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a', JsonText(in_string=True)),
        ('{"a"', JsonText()),
        (r'{"a\"', JsonText(in_string=True)),
        ('{"a\\', JsonText(in_string=True, is_escaped=True)),
        (r'{"a\\"', JsonText()),
        ('{"a": -1.5e', JsonText(in_number=True)),
        ('{"a": 1,', JsonText()),
        ('{"1', JsonText(in_string=True)),
    ],
)
def test_the_place_in_a_text_is_known(text: str, expected: JsonText) -> None:
    for size in (1, 3):
        found = JsonText()
        for begin in range(0, len(text), size):
            found.append(text[begin : begin + size].encode())
        assert found == expected


SHORT_VALUES: dict[str, tuple[Any, str]] = {  # a schema, and a value of as few tokens as any
    "any": ({}, "0"),
    "object": ({"type": "object"}, "{}"),
    "list": ({"type": "array"}, "[]"),
    "boolean": ({"type": "boolean"}, "true"),
    "null": ({"type": "null"}, "null"),
    "integer": ({"type": "integer", "maximum": -5}, "-6"),
    "string": ({"type": "string"}, '""'),
    "enum": ({"enum": ["red", "blue", True, 12]}, "12"),
    "pattern": ({"type": "string", "pattern": "^[a-c]{2,4}$"}, '"ab"'),
    "required": ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a":0}'),
    "items": ({"type": "array", "items": {"type": "boolean"}, "minItems": 1}, "[true]"),
    "alternatives": ({"anyOf": [named("long", key={"type": "string"}), {"type": "boolean"}]}, "true"),
}


@pytest.mark.parametrize("vocabulary", [VOCABULARY, respelled()], ids=["demo", "respelled"])
@pytest.mark.parametrize("kind", SHORT_VALUES)
def test_an_answer_of_few_tokens_is_whole_where_a_value_fits(kind: str, vocabulary: Vocabulary) -> None:
    """Also where only the value fits, and not the token that ends the answer."""
    schema, value = SHORT_VALUES[kind]
    grammar = for_answer(grammar_of(schema), TOKENIZER)
    ahead = lookahead_of(grammar, vocabulary)
    least = min(len(vocabulary.tokens(space + value)) for space in ("", " "))
    for limit in range(least, 9):
        for seed in range(SEEDS):
            preferred = ((), (b" ", b" t", b"f", b'"'), (b"-", b" {", b" [", b' "'))[seed % 3]
            choose = by_chance(seed, *preferred, vocabulary=vocabulary)
            tokens, has_ended, _ = sampled(grammar, limit, choose, ahead, vocabulary)
            text = b"".join(map(vocabulary.text, tokens)).decode()
            jsonschema.validate(json.loads(text), schema)
            assert has_ended or limit == least, text


def test_the_model_chooses_between_values_that_fit() -> None:
    grammar = for_answer(grammar_of({"type": "boolean"}), TOKENIZER)
    answers = {TOKENIZER.decode(sampled(grammar, 5, by_chance(seed))[0]).strip() for seed in range(24)}
    assert answers == {"true", "false"}
