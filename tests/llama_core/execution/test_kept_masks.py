"""What `JsonEnding` keeps of a mask for other answers and for the rest of a string is what it would find again."""

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from string import ascii_letters
from typing import Any, ClassVar, cast
from unittest.mock import patch

import numpy as np
import pytest

from llama_core.execution.grammars.closing_path import LimitsExceeded
from llama_core.execution.grammars.json_ending import JsonEnding
from llama_core.execution.grammars.json_vocabulary import tokens_of
from llama_core.execution.grammars.tokens_in_time import TokensInTime
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.tokenizer import Tokenizer
from llama_core.text.tools.registry import find_tool_format
from llama_core.text.tools.tool import ToolUse
from tests.programs.structured_output import bounded, unbounded
from tests.support.sampled_answers import (
    NUM_WORDS,
    SEEDS,
    TOKENIZER,
    VOCABULARY,
    Respelled,
    Vocabulary,
    behind,
    by_chance,
    ending_of,
    grammar_of,
    lookahead_of,
    respelled,
    sampled,
)
from tests.support.tool_calls import TOOLS

TEXT = {"type": "string"}


def members(key: Any, **others: Any) -> dict[str, Any]:
    """An object of exactly these members, of which the first is "k"."""
    properties = {"k": key, **others}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@contextmanager
def checking_what_is_kept(known: list[int]) -> Iterator[None]:
    """Compares what is kept of each mask with what is found without the tokens and the answers before, as on new ranks.
    known: the positions of the masks that were not looked at again."""
    kept, in_time, num_looks = JsonEnding._kept, JsonEnding._in_time, [0]

    def counted(self: JsonEnding, most: int) -> TokensInTime:
        num_looks[0] += 1
        return in_time(self, most)

    def kept_and_found_again(self: JsonEnding, bits: np.ndarray, position: int) -> np.ndarray | None:
        in_string, self.in_string = self.in_string, None
        of_others, self.ahead._known = self.ahead._known, OrderedDict()
        num_looks[0] = 0
        found_again = kept(self, bits.copy(), position)
        is_found, num_looks[0] = num_looks[0] > 0, 0
        self.in_string, self.ahead._known = in_string, of_others
        found = kept(self, bits, position)
        if is_found and not num_looks[0]:
            known.append(position)
        assert np.array_equal(bits if found is None else found, bits if found_again is None else found_again)
        return found

    with patch.object(JsonEnding, "_kept", kept_and_found_again), patch.object(JsonEnding, "_in_time", counted):
        yield


def test_what_is_kept_of_a_mask_does_not_depend_on_earlier_answers() -> None:
    """Of the same grammar, with other strings and numbers and within other limits."""
    known: list[int] = []
    num_with_outlines = 0
    with checking_what_is_kept(known):
        for seed in range(2 * SEEDS):
            grammar = grammar_of((bounded, unbounded)[seed % 2](random.Random(seed)))
            ahead = lookahead_of(grammar)
            num_with_outlines += ahead.has_outlines
            for i, limit in enumerate((64, 40, 100, 64, 52, 80)):
                sampled(grammar, limit, by_chance(100 * seed + i, b'"', b',"', b'":'), ahead)
    assert num_with_outlines > SEEDS and len(known) > 100


def test_another_answer_of_the_same_outline_is_not_looked_at_again() -> None:
    schema = members(TEXT, flag={"type": "boolean"}, tags={"type": "array", "items": TEXT})
    grammar = grammar_of(schema)
    ahead, looks = lookahead_of(grammar), list[int]()
    fits = TokensInTime._fits

    def counted(self: TokensInTime, *how: Any) -> bool:
        looks[-1] += 1
        return fits(self, *how)

    with patch.object(TokensInTime, "_fits", counted):
        for text in ('{"k":"one","flag":true,"tags":["a","b"]}', '{"k":"three two","flag":true,"tags":["cc","d"]}'):
            looks.append(0)
            tokens = list(VOCABULARY.tokens(text))
            sampled(grammar, len(tokens) + 20, behind(tokens, by_chance(0)), ahead)
    assert looks[0] > 50 and looks[1] < looks[0] / 10


def test_only_answers_whose_strings_decide_nothing_have_outlines() -> None:
    alternatives = {"anyOf": [members({"const": "one"}, a=TEXT), members({"const": "two"}, b={"type": "number"})]}
    assert lookahead_of(grammar_of(members({"enum": ["one", "two"]}, a=TEXT))).has_outlines
    assert not lookahead_of(grammar_of(alternatives)).has_outlines
    answers = AnswerFormat(TOKENIZER, find_tool_format("hermes"), None)
    for mode in ("required", "auto"):  # the name decides on the arguments
        assert not lookahead_of(answers.grammar(ToolUse(TOOLS, mode), begun=False)).has_outlines


LONG = "a long text " * 5


@pytest.mark.parametrize(
    ("schema", "begins"),
    [
        ({"enum": [["a", [1] * 20], ["a", 2], ["b", [1]], ["b", 2]]}, ('["a",', '["b",')),
        (
            members({"type": "number"}, s={"type": "array", "items": {"enum": ["a", "b", LONG]}, "uniqueItems": True}),
            ('{"k":1,"s":["a"', '{"k":1,"s":["b"'),
        ),
        (
            {"type": "array", "items": {"enum": ["x", LONG]}, "contains": {"const": "x"}}
            | {"minContains": 0, "maxContains": 2},
            ('["x"', f'["{LONG}"'),
        ),
    ],
    ids=["an enum of lists", "a list of distinct values", "a list that contains some"],
)
def test_what_may_follow_a_string_is_not_taken_for_what_may_follow_another(schema: Any, begins: Sequence[str]) -> None:
    grammar = grammar_of(schema)
    assert not lookahead_of(grammar).has_outlines
    with checking_what_is_kept([]):
        for num_left in range(8, 40, 2):
            for order in (begins, begins[::-1]):
                ahead = lookahead_of(grammar)
                for tokens in map(VOCABULARY.tokens, order):
                    choose = behind(tokens, by_chance(num_left, b",", b"[", b"]"))
                    sampled(grammar, len(tokens) + num_left, choose, ahead)


@pytest.mark.parametrize("max_followed", range(32, 40))
def test_what_is_kept_does_not_depend_on_an_answer_with_fewer_tokens_left(
    max_followed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more of them left, more tokens are followed before the rest is guessed."""
    monkeypatch.setattr("llama_core.execution.grammars.tokens_in_time._MAX_FOLLOWED", max_followed)
    monkeypatch.setattr("llama_core.execution.grammars.tokens_in_time._MAX_TOKENS", 8)
    grammar, vocabulary = grammar_of({"type": "array", "items": TEXT}), respelled()
    ahead, begin = lookahead_of(grammar, vocabulary), vocabulary.tokens('["a",')
    bits = np.zeros(NUM_WORDS, np.uint32)
    with checking_what_is_kept([]):
        for num_left in range(7, 20):
            matcher = vocabulary.matcher(grammar)
            assert matcher.try_consume_tokens(begin) == len(begin)
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            ending = JsonEnding.of(ahead, 0, len(begin) + num_left)
            ending.append(begin, 0)
            ending.narrow(bits, len(begin))


class _WithLongToken(Respelled):
    """A token begins a string, and another one all of its characters."""

    TEXTS: ClassVar = {**Respelled.TEXTS, 960: b'"x', 961: b'"x' + b"^" * 12}


def test_a_token_that_begins_a_late_text_is_judged_again_with_fewer_tokens_left() -> None:
    """With 14 tokens behind it, `"x` is late with a text that token 961 begins; with 10, that text is shorter."""
    vocabulary = Vocabulary.of(cast(Tokenizer, _WithLongToken()))
    grammar = grammar_of({"type": "array", "items": {"type": "string", "pattern": "^(y|x[~^]{12})$"}})
    ahead, begin = lookahead_of(grammar, vocabulary), vocabulary.tokens('["y",')
    matcher = vocabulary.matcher(grammar)
    assert matcher.try_consume_tokens(begin) == len(begin)
    keeps_long = list[bool]()
    with checking_what_is_kept([]):
        for num_left in (15, 11):
            bits = np.zeros(NUM_WORDS, np.uint32)
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            ending = JsonEnding.of(ahead, 0, len(begin) + num_left)
            ending.append(begin, 0)
            ending.narrow(bits, len(begin))
            keeps_long.append(961 in tokens_of(bits))
    assert keeps_long == [False, True]


def test_what_was_found_beyond_the_limits_is_not_kept() -> None:
    grammar = grammar_of({"type": "array", "items": TEXT})
    begin, bits = VOCABULARY.tokens('["a",'), np.zeros(NUM_WORDS, np.uint32)
    matcher = VOCABULARY.matcher(grammar)
    assert matcher.try_consume_tokens(begin) == len(begin)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    ending = ending_of(grammar, len(begin) + 20)
    ending.append(begin, 0)
    with (
        patch.object(TokensInTime, "of", autospec=True, side_effect=TokensInTime.of) as found,
        patch("llama_core.execution.grammars.json_ending.check_limits", side_effect=[LimitsExceeded, None, None]),
    ):
        ending.narrow(bits, len(begin))
    assert found.call_count == 2 and not ending.is_broken


def test_what_is_kept_within_a_string_is_what_would_be_found_again() -> None:
    known: list[int] = []
    letters = [letter.encode() for letter in ascii_letters]
    with checking_what_is_kept(known):
        for seed in range(2 * SEEDS):
            schema = unbounded(random.Random(seed))
            sampled(grammar_of(schema), (40, 64, 100)[seed % 3], by_chance(seed, *letters[seed % 2 :: 2]))
    assert len(known) > 20


@pytest.mark.parametrize(
    ("schema", "begin", "is_known"),
    [
        ({"type": "object", "properties": {"k": TEXT}, "required": ["k"]}, '{"k":"aaa', True),
        ({"type": "array", "items": {"anyOf": [TEXT, {"type": "null"}]}}, '["aaa', True),
        # behind the string, another member may follow as long as there is room for it
        (members(TEXT, another=TEXT) | {"required": ["k"]}, '{"k":"aaa', True),
        ({"type": "object", "additionalProperties": TEXT}, '{"aaa', False),  # a key, which decides on its value
        (
            {"anyOf": [members({"type": "string", "pattern": "^[^q]*$"}, p=TEXT), members(TEXT, z=TEXT)]},
            '{"k":"aaa',
            False,
        ),
    ],
    ids=["a value", "a value or null", "a value before another", "a key", "one of two patterns"],
)
def test_a_mask_is_known_again_only_where_the_strings_text_decides_nothing(
    schema: Any, begin: str, is_known: bool
) -> None:
    known: list[int] = []
    vocabulary = respelled()  # with a token for `",`
    tokens = vocabulary.tokens(begin)
    with checking_what_is_kept(known):  # up to the limit
        choose = behind(tokens, by_chance(0, b"a", vocabulary=vocabulary))
        sampled(grammar_of(schema), len(tokens) + 24, choose, vocabulary=vocabulary)
    assert bool(known) == is_known
