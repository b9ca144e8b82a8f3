"""Answers of JSON come to their end also where one token ends a value and begins the next, as in larger vocabularies."""

from collections.abc import Iterator
from functools import partial

import pytest

from llama_core.text.answer_format import AnswerFormat
from llama_core.text.reasoning import ReasoningMarks
from llama_core.text.tools.registry import find_tool_format
from tests.support import sampled_answers
from tests.support.sampled_answers import BIG, RESPELLED, STORY, TOKENIZER, behind, grammar_of, respelled

VOCABULARY = respelled()
by_chance = partial(sampled_answers.by_chance, vocabulary=VOCABULARY)
sampled = partial(sampled_answers.sampled, vocabulary=VOCABULARY)


def test_an_escape_that_begins_with_one_token_is_in_time() -> None:
    begin, choose = VOCABULARY.tokens('{"story":"a'), by_chance(0)
    num_escapes = 0
    for num_left in range(5, 16):
        tokens = iter(begin)

        def choose_escape(allowed: list[int], tokens: Iterator[int] = tokens) -> int:
            return next(tokens, None) or (900 if 900 in allowed else choose(allowed))

        found, has_ended, _ = sampled(grammar_of(STORY), len(begin) + num_left, choose_escape)
        assert has_ended, num_left
        num_escapes += found.count(900)
    assert num_escapes > 4


def test_tokens_that_begin_alike_are_told_apart() -> None:
    names = ["description", *(f"{chr(99 + i)}name" for i in range(20))]
    properties = {name: {"type": "string"} for name in names} | {"big": BIG}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    for limit in range(30, 110, 16):
        tokens, has_ended, _ = sampled(grammar_of(schema), limit, by_chance(limit, b'"big', b","))
        assert has_ended, b"".join(map(VOCABULARY.text, tokens))


@pytest.mark.parametrize(
    ("schema", "limit", "expected"),
    [
        ({"type": "object"}, 2, "{}"),
        ({"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}, 7, '{"n":""}'),
        ({"type": "string"}, 2, '""'),
    ],
)
def test_an_empty_value_of_one_token_ends_an_answer_in_time(
    schema: dict[str, object], limit: int, expected: str
) -> None:
    for seed in range(3):
        tokens, has_ended, _ = sampled(grammar_of(schema), limit, by_chance(seed, b"{", b"{}", b'""'))
        assert has_ended
        assert b"".join(map(VOCABULARY.text, tokens)).decode() == expected


@pytest.mark.parametrize("num_left", [12, 40, 120])
def test_a_token_is_not_dropped_for_a_longer_one_that_begins_alike(num_left: int) -> None:
    schema = {"type": "object", "additionalProperties": {"anyOf": [{"type": "integer"}, BIG]}}
    parts: list[str | int] = ['{"', "abc", 902, "1", ',"', "d", 902, "22", "}"]
    begin = [token for part in parts for token in ([part] if isinstance(part, int) else VOCABULARY.tokens(part))]
    sampled(grammar_of(schema), len(begin) + num_left, behind(begin, by_chance(0)))


def test_what_is_in_time_in_one_string_is_not_taken_for_the_next() -> None:
    """Behind the second string a digest must follow, behind the first one another string."""
    digest = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
    text = {"type": "string"}
    schema = {"type": "array", "prefixItems": [text, text, digest], "items": False}
    begin = [*VOCABULARY.tokens('["cat'), 951]
    for num_left in (12, 24, 40):
        for seed in range(3):
            choose = behind(begin, by_chance(seed, b'","', b'",', b"a"))
            tokens, has_ended, _ = sampled(grammar_of(schema), len(begin) + num_left, choose)
            assert has_ended, TOKENIZER.decode(tokens)


def test_a_token_that_many_others_end_alike_is_not_guessed() -> None:
    """Punctuation before the end of a string changes nothing of what comes behind it."""
    properties = {"note": {"type": "string"}, "big": BIG}
    schema = {"type": "object", "properties": properties, "required": ["note"], "additionalProperties": False}
    begin = VOCABULARY.tokens('{"note":"a dog')
    for num_left in (30, 60, 90):
        choose = behind(begin, by_chance(num_left, b'",'))
        tokens, has_ended, _ = sampled(grammar_of(schema), len(begin) + num_left, choose)
        assert has_ended, TOKENIZER.decode(tokens)


def test_json_that_begins_in_the_token_that_ends_the_reasoning_is_followed() -> None:
    answers = AnswerFormat(RESPELLED, find_tool_format("hermes"), ReasoningMarks())
    begin = [*VOCABULARY.tokens("I think.</think"), 901, *VOCABULARY.tokens('story":"' + "a dog " * 60)]
    grammar = answers.after_reasoning(grammar_of(STORY), begun=True)
    for num_left in (20, 40):
        _, has_ended, is_shortened = sampled(
            grammar, len(begin) + num_left, behind(begin, by_chance(num_left, b"a", b"b"))
        )
        assert has_ended and is_shortened
