"""Answers of JSON schemas come to their end before the limit, whatever tokens are sampled, and only there."""

import json
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_letters
from typing import Any, ClassVar, cast
from unittest.mock import Mock, patch

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from llama_core.execution.closing_path import LimitsExceeded, Search
from llama_core.execution.grammar_masks import SlotGrammars
from llama_core.execution.json_ending import JsonEnding
from llama_core.execution.json_lookahead import Lookahead
from llama_core.execution.json_vocabulary import JsonText, JsonVocabulary, tokens_of
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit
from llama_core.text.answer_format import MAX_GRAMMAR_BYTES, AnswerFormat
from llama_core.text.grammar import (
    begins_with_text,
    checked_grammar,
    is_of_schema,
    json_description,
    json_schema_grammar,
    limits,
)
from llama_core.text.grammar_vocabulary import grammar_vocabulary
from llama_core.text.reasoning import ReasoningMarks
from llama_core.text.registry import load_tokenizer
from llama_core.text.tools.pieces import Arguments, CallStart, Content, joined
from llama_core.text.tools.registry import find_tool_format
from llama_core.text.tools.tool import Call, Tool, ToolUse
from tests.programs.structured_output import bounded, unbounded
from tests.support.full_runs import examples
from tests.support.tool_calls import FORMATS, NUMBER, TOOLS

TOKENIZER = load_tokenizer(Path(__file__).parents[3] / "demo" / "tokenizer.model")
NUM_WORDS = -(-TOKENIZER.n_words // 32)
VOCABULARY = grammar_vocabulary(TOKENIZER, TOKENIZER.stop_ids)
JSON_VOCABULARY = JsonVocabulary(VOCABULARY, NUM_WORDS)
SEEDS = examples(5, 12)  # of random answers


def lookahead_of(grammar: str) -> Lookahead:
    compiled = partial(LLMatcher, VOCABULARY, grammar, log_level=0, limits=limits())
    return Lookahead(
        compiled,
        JSON_VOCABULARY,
        json_description(grammar),
        begins_with_text=begins_with_text(grammar),
        is_schema=is_of_schema(grammar),
    )


def ending_of(grammar: str, limit: int) -> JsonEnding:
    return JsonEnding.of(lookahead_of(grammar), 0, limit)


Choose = Callable[[list[int]], int]


def by_chance(seed: int, *preferred: bytes) -> Choose:
    """A token whose text is preferred, if one is allowed; else any."""
    draw = random.Random(seed)

    def choose(allowed: list[int]) -> int:
        first = [token for token in allowed if JSON_VOCABULARY.text(token) in preferred]
        return draw.choice(first or allowed)

    return choose


def sampled(grammar: str, limit: int, choose: Choose, ahead: Lookahead | None = None) -> tuple[list[int], bool, bool]:
    """The chosen tokens; whether the answer ended, and whether a text was lost. ahead: of the grammar, shared by answers."""
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
    ending, bits = JsonEnding.of(ahead or lookahead_of(grammar), 0, limit), np.zeros(NUM_WORDS, np.uint32)
    tokens: list[int] = []
    is_shortened = False
    for position in range(limit):
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        is_shortened |= ending.narrow(bits, position)
        token = choose(tokens_of(bits))
        if token in TOKENIZER.stop_ids:
            return tokens, True, is_shortened
        assert matcher.try_consume_tokens([token]) == 1
        tokens.append(token)
        ending.append([token], position)
    return tokens, False, is_shortened


def grammar_of(schema: Any) -> str:
    return checked_grammar(json_schema_grammar(schema), "g")


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


TEXT = {"type": "string"}


def members(key: Any, **others: Any) -> dict[str, Any]:
    """An object of exactly these members, of which the first is "k"."""
    properties = {"k": key, **others}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def checking_what_is_kept(known_parts: list[np.ndarray]) -> Any:
    """Compares what is kept of each mask with what is found without the tokens and the answers before, as on new ranks.
    known_parts: of the masks that were not looked at again."""
    kept = JsonEnding._kept

    def kept_and_found_again(self: JsonEnding, bits: np.ndarray, position: int) -> np.ndarray:
        in_string, self.in_string = self.in_string, None
        known, self.ahead._known = self.ahead._known, OrderedDict()
        found_again = kept(self, bits.copy(), position)
        self.in_string, self.ahead._known = in_string, known
        before = [in_string, *known.values()]
        found = kept(self, bits, position)
        if any(each is not None and found is each.kept for each in before):
            known_parts.append(found)
        assert np.array_equal(found, found_again)
        return found

    return patch.object(JsonEnding, "_kept", kept_and_found_again)


def test_what_is_kept_of_a_mask_does_not_depend_on_earlier_answers() -> None:
    """Of the same grammar, with other strings and numbers and within other limits."""
    known_parts: list[np.ndarray] = []
    num_with_outlines = 0
    with checking_what_is_kept(known_parts):
        for seed in range(2 * SEEDS):
            grammar = grammar_of((bounded, unbounded)[seed % 2](random.Random(seed)))
            ahead = lookahead_of(grammar)
            num_with_outlines += ahead.has_outlines
            for i, limit in enumerate((64, 40, 100, 64, 52, 80)):
                sampled(grammar, limit, by_chance(100 * seed + i, b'"', b',"', b'":'), ahead)
    assert num_with_outlines > SEEDS and len(known_parts) > 100


def test_another_answer_of_the_same_outline_is_not_looked_at_again() -> None:
    schema = members(TEXT, flag={"type": "boolean"}, tags={"type": "array", "items": TEXT})
    grammar = grammar_of(schema)
    ahead, looks = lookahead_of(grammar), list[int]()
    fits = JsonEnding._fits

    def counted(self: JsonEnding, *how: Any) -> bool:
        looks[-1] += 1
        return fits(self, *how)

    with patch.object(JsonEnding, "_fits", counted):
        for text in ('{"k":"one","flag":true,"tags":["a","b"]}', '{"k":"three two","flag":true,"tags":["cc","d"]}'):
            looks.append(0)
            tokens = list(VOCABULARY.tokenize_str(text))
            sampled(grammar, len(tokens) + 20, behind(tokens, by_chance(0)), ahead)
    assert looks[0] > 100 and looks[1] < looks[0] / 10


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
                for tokens in map(VOCABULARY.tokenize_str, order):
                    choose = behind(tokens, by_chance(num_left, b",", b"[", b"]"))
                    sampled(grammar, len(tokens) + num_left, choose, ahead)


@pytest.mark.parametrize("max_followed", range(32, 40))
def test_what_is_kept_does_not_depend_on_an_answer_with_fewer_tokens_left(
    max_followed: int, monkeypatch: pytest.MonkeyPatch, respelled: None
) -> None:
    """With more of them left, more tokens are followed before the rest is guessed."""
    monkeypatch.setattr("llama_core.execution.json_ending._MAX_FOLLOWED", max_followed)
    monkeypatch.setattr("llama_core.execution.json_ending._MAX_TOKENS", 8)
    grammar = grammar_of({"type": "array", "items": TEXT})
    ahead, begin = lookahead_of(grammar), VOCABULARY.tokenize_str('["a",')
    bits = np.zeros(NUM_WORDS, np.uint32)
    with checking_what_is_kept([]):
        for num_left in range(7, 20):
            matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
            assert matcher.try_consume_tokens(begin) == len(begin)
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            ending = JsonEnding.of(ahead, 0, len(begin) + num_left)
            ending.append(begin, 0)
            ending.narrow(bits, len(begin))


def test_what_was_found_beyond_the_limits_is_not_kept() -> None:
    grammar = grammar_of({"type": "array", "items": TEXT})
    begin, bits = VOCABULARY.tokenize_str('["a",'), np.zeros(NUM_WORDS, np.uint32)
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
    assert matcher.try_consume_tokens(begin) == len(begin)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    ending = ending_of(grammar, len(begin) + 20)
    ending.append(begin, 0)
    with (
        patch.object(JsonEnding, "_few_in_time", autospec=True, side_effect=JsonEnding._few_in_time) as found,
        patch("llama_core.execution.json_ending.check_limits", side_effect=[LimitsExceeded, None, None]),
    ):
        ending.narrow(bits, len(begin))
    assert found.call_count == 2 and not ending.is_broken


def test_what_is_kept_within_a_string_is_what_would_be_found_again() -> None:
    known_parts: list[np.ndarray] = []
    letters = [letter.encode() for letter in ascii_letters]
    with checking_what_is_kept(known_parts):
        for seed in range(2 * SEEDS):
            schema = unbounded(random.Random(seed))
            sampled(grammar_of(schema), (40, 64, 100)[seed % 3], by_chance(seed, *letters[seed % 2 :: 2]))
    assert len(known_parts) > 20


@pytest.mark.parametrize(
    ("schema", "begin", "is_known"),
    [
        ({"type": "object", "properties": {"k": TEXT}, "required": ["k"]}, '{"k":"aaa', True),
        ({"type": "array", "items": {"anyOf": [TEXT, {"type": "null"}]}}, '["aaa', True),
        ({"type": "object", "additionalProperties": TEXT}, '{"aaa', False),  # a key, which decides on its value
        (
            {"anyOf": [members({"type": "string", "pattern": "^[^q]*$"}, p=TEXT), members(TEXT, z=TEXT)]},
            '{"k":"aaa',
            False,
        ),
    ],
    ids=["a value", "a value or null", "a key", "one of two patterns"],
)
def test_a_mask_is_known_again_only_where_the_strings_text_decides_nothing(
    schema: Any, begin: str, is_known: bool
) -> None:
    known_parts: list[np.ndarray] = []
    letter = JSON_VOCABULARY.characters[b"a"]
    tokens = [*VOCABULARY.tokenize_str(begin), *[letter] * 4]
    with checking_what_is_kept(known_parts):
        sampled(grammar_of(schema), len(tokens) + 20, behind(tokens, by_chance(0, b'"')))
    assert bool(known_parts) == is_known


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


def test_whether_an_answer_can_end_is_found_once() -> None:
    """Else each of its tokens would cost as much as following its whole grammar."""
    ending = ending_of(grammar_of({"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 40}), 60)
    bits = np.full(NUM_WORDS, 2**32 - 1, np.uint32)
    assert not ending.narrow(bits, ending.first_watched) and ending.place.path == []
    with patch.object(Search, "path", side_effect=AssertionError):
        assert not ending.narrow(bits, ending.first_watched + 1)


def test_an_answer_that_takes_long_at_least_is_not_watched() -> None:
    ending = ending_of(grammar_of({"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 5000}), 200)
    assert ending.first_watched == 200


STORY = {
    "type": "object",
    "properties": {"story": {"type": "string"}},
    "required": ["story"],
    "additionalProperties": False,
}
LONG_STORY = 'Once upon a time 😀 there was a \\"dog\\". ' * 30
BIG = {"type": "object", "properties": {f"key_number_{i}": {"type": "integer"} for i in range(12)}}
BIG["required"] = list(BIG["properties"])


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
RED_OR_BLUE = {"type": "array", "items": {"enum": ["red", "blue"]}}


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
    begin = len(VOCABULARY.tokenize_str('{"'))
    for seed, num_left in enumerate((90, 100, 110, 120)):
        choose = after('{"', by_chance(seed, b"k", b"key", b"st", b"b", b"c"))
        tokens, has_ended, _ = sampled(grammar_of(schema), begin + num_left, choose)
        assert has_ended, TOKENIZER.decode(tokens)


def test_an_answer_without_a_path_is_looked_at_again_a_few_times() -> None:
    """The model may take a shorter way than the one that was found; to look at each token would take too long."""
    grammar = grammar_of(RED_OR_BLUE | {"minItems": 40})
    with patch.object(Search, "path", autospec=True, side_effect=Search.path) as found:
        _, has_ended, _ = sampled(grammar, 100, by_chance(0))
    assert not has_ended and 1 < found.call_count < 24


def test_the_closing_path_writes_no_spaces() -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": -1}, "minItems": 3}
    matcher = LLMatcher(VOCABULARY, grammar_of(schema), log_level=0, limits=limits())
    path = Search(JSON_VOCABULARY, 256).path(matcher, JsonText())
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


def test_digests_are_followed_ahead_a_few_times_only() -> None:
    """Other rows wait for the masks of a step, so each is to be made within milliseconds."""
    schema = {"type": "array", "items": {"type": "string", "pattern": "^[0-9a-f]{64}$"}}
    digits = by_chance(1, b'","', b'"', b",", *(bytes([char]) for char in b"0123456789abcdef"))
    with patch.object(Search, "path", autospec=True, side_effect=Search.path) as followed:
        tokens, has_ended, is_shortened = sampled(grammar_of(schema), 230, digits)
    assert has_ended and is_shortened and len(tokens) > 180
    assert followed.call_count < 40, "once for most of the tokens that begin or end a digest"


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


def test_looking_ahead_beyond_the_limits_of_a_grammar_breaks_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = grammar_of({"type": "array", "items": {"type": "string"}})
    grammars = SlotGrammars(lambda: VOCABULARY, TOKENIZER.n_words, 2, 4096)
    text = VOCABULARY.tokenize_str('["some words of a text')

    def mask(max_tokens: int) -> np.ndarray:
        params = SamplingParams(max_tokens=max_tokens, grammar=grammar)
        grammars.admit(SlotInit(0, [1, *text], [], params, prompt_length=1))
        masks = grammars.begin([Row(0, 0, 1 + len(text), True)])
        assert masks is not None
        masks.wait()
        assert masks.reasons == {}
        bits: np.ndarray = masks.bits[0]
        return bits

    expected, closing = mask(4000), mask(len(text) + 3)
    assert expected.any() and not np.array_equal(closing, expected)
    with monkeypatch.context() as patched:
        patched.setattr(Search, "path", Mock(side_effect=LimitsExceeded))
        assert np.array_equal(mask(len(text) + 3), expected), "the answer is left as it is"
    assert np.array_equal(mask(len(text) + 3), closing), "the grammar is compiled again for looking ahead"
    grammars.close()


@pytest.mark.parametrize(
    ("pattern", "num_states"),
    [("^([ab]*a[ab]{13})*$", 1000), ("^([ab]*a[ab]{13})*$", 700), ("^.*a.{12}$", 2500)],
    ids=["looking ahead", "looking ahead twice", "masks"],
)
def test_an_answer_does_not_depend_on_earlier_ones_that_used_up_the_grammars_limits(
    pattern: str, num_states: int
) -> None:
    """Matchers of one grammar share the states of its lexer, of which these patterns have thousands."""
    properties = {"v": {"type": "string", "pattern": pattern}, "w": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["v", "w"], "additionalProperties": False}
    grammar, compiled = grammar_of(schema), SlotGrammars._compile
    few = LLParserLimits(max_lexer_states=num_states, initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000)

    def answer(grammars: SlotGrammars, seed: int) -> list[int]:
        params = SamplingParams(max_tokens=60, grammar=grammar)
        grammars.admit(SlotInit(0, [1], [], params, prompt_length=1))
        tokens: list[int] = []
        choose = after('{"v":"', by_chance(seed, b"a", b"b"))
        while len(tokens) < 60 and (not tokens or tokens[-1] not in TOKENIZER.stop_ids):
            masks = grammars.begin([Row(0, len(tokens), 1, True)])
            assert masks is not None
            masks.wait()
            assert masks.reasons == {}
            tokens.append(choose(tokens_of(masks.bits[0].copy())))
            grammars.follow(masks, partial(list, tokens[-1:]))
        return tokens

    with (
        patch("llama_core.text.grammar.limits", lambda: few),
        patch.object(SlotGrammars, "_compile", autospec=True, side_effect=compiled) as compile_again,
    ):
        shared = SlotGrammars(lambda: VOCABULARY, TOKENIZER.n_words, 1, 4096)
        answers = [answer(shared, seed) for seed in range(examples(4, 6))]
        assert compile_again.call_count > 1, "the limits are used up"
        shared.close()
        for seed, expected in enumerate(answers):
            own = SlotGrammars(lambda: VOCABULARY, TOKENIZER.n_words, 1, 4096)
            assert answer(own, seed) == expected
            own.close()


def test_an_answer_beyond_the_limits_alone_is_left_as_it_is() -> None:
    ending = ending_of(grammar_of(STORY), 40)
    tokens = VOCABULARY.tokenize_str('{"story":"a dog')

    with (
        patch.object(Search, "path", side_effect=LimitsExceeded),
        patch.object(ending.ahead, "compiled", side_effect=ending.ahead.compiled) as compiled,
    ):
        for position, token in enumerate(tokens):
            bits = np.full(NUM_WORDS, 2**32 - 1, np.uint32)
            assert not ending.narrow(bits, position) and bits.all()
            ending.append([token], position)
    assert ending.is_broken and compiled.call_count == 2, "for a mask, and for the token behind it"


class Respelled:
    """The demo model's tokenizer with other texts of two tokens, as larger vocabularies have them."""

    TEXTS: ClassVar = {
        **{900: b"\\u", 901: b'>{"', 902: b'":', 903: b'":{"', 904: b'"description', 905: b'"big'},
        **{910 + i: f'"{chr(99 + i)}name'.encode() for i in range(20)},
        **{930 + i: char.encode() + b'",' for i, char in enumerate(".!?:;)]}>-_ ")},
        **{950: b'",', 951: b'","'},
    }

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)

    def token_bytes(self, token: int) -> bytes:
        return self.TEXTS.get(token) or TOKENIZER.token_bytes(token)


@pytest.fixture
def respelled(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = grammar_vocabulary(cast(Any, Respelled()), TOKENIZER.stop_ids)
    monkeypatch.setattr(f"{__name__}.VOCABULARY", vocabulary)
    monkeypatch.setattr(f"{__name__}.JSON_VOCABULARY", JsonVocabulary(vocabulary, NUM_WORDS))


@pytest.mark.usefixtures("respelled")
def test_an_escape_that_begins_with_one_token_is_in_time() -> None:
    begin, choose = VOCABULARY.tokenize_str('{"story":"a'), by_chance(0)
    num_escapes = 0
    for num_left in range(5, 16):
        tokens = iter(begin)

        def choose_escape(allowed: list[int], tokens: Iterator[int] = tokens) -> int:
            return next(tokens, None) or (900 if 900 in allowed else choose(allowed))

        found, has_ended, _ = sampled(grammar_of(STORY), len(begin) + num_left, choose_escape)
        assert has_ended, num_left
        num_escapes += found.count(900)
    assert num_escapes > 4


@pytest.mark.usefixtures("respelled")
def test_tokens_that_begin_alike_are_told_apart() -> None:
    names = ["description", *(f"{chr(99 + i)}name" for i in range(20))]
    properties = {name: {"type": "string"} for name in names} | {"big": BIG}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    for limit in range(30, 110, 16):
        tokens, has_ended, _ = sampled(grammar_of(schema), limit, by_chance(limit, b'"big', b","))
        assert has_ended, b"".join(map(JSON_VOCABULARY.text, tokens))


@pytest.mark.usefixtures("respelled")
@pytest.mark.parametrize("num_left", [12, 40, 120])
def test_a_token_is_not_dropped_for_a_longer_one_that_begins_alike(num_left: int) -> None:
    schema = {"type": "object", "additionalProperties": {"anyOf": [{"type": "integer"}, BIG]}}
    parts: list[str | int] = ['{"', "abc", 902, "1", ',"', "d", 902, "22", "}"]
    begin = [token for part in parts for token in ([part] if isinstance(part, int) else VOCABULARY.tokenize_str(part))]
    sampled(grammar_of(schema), len(begin) + num_left, behind(begin, by_chance(0)))


@pytest.mark.usefixtures("respelled")
def test_what_is_in_time_in_one_string_is_not_taken_for_the_next() -> None:
    """Behind the second string a digest must follow, behind the first one another string."""
    digest = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
    text = {"type": "string"}
    schema = {"type": "array", "prefixItems": [text, text, digest], "items": False}
    begin = [*VOCABULARY.tokenize_str('["cat'), 951]
    for num_left in (12, 24, 40):
        for seed in range(3):
            choose = behind(begin, by_chance(seed, b'","', b'",', b"a"))
            tokens, has_ended, _ = sampled(grammar_of(schema), len(begin) + num_left, choose)
            assert has_ended, TOKENIZER.decode(tokens)


@pytest.mark.usefixtures("respelled")
def test_a_token_that_many_others_end_alike_is_not_guessed() -> None:
    """Punctuation before the end of a string changes nothing of what comes behind it."""
    properties = {"note": {"type": "string"}, "big": BIG}
    schema = {"type": "object", "properties": properties, "required": ["note"], "additionalProperties": False}
    begin = VOCABULARY.tokenize_str('{"note":"a dog')
    for num_left in (30, 60, 90):
        choose = behind(begin, by_chance(num_left, b'",'))
        tokens, has_ended, _ = sampled(grammar_of(schema), len(begin) + num_left, choose)
        assert has_ended, TOKENIZER.decode(tokens)


@pytest.mark.usefixtures("respelled")
def test_json_that_begins_in_the_token_that_ends_the_reasoning_is_followed() -> None:
    answers = AnswerFormat(cast(Any, Respelled()), find_tool_format("hermes"), ReasoningMarks())
    begin = [*VOCABULARY.tokenize_str("I think.</think"), 901, *VOCABULARY.tokenize_str('story":"' + "a dog " * 60)]
    grammar = answers.after_reasoning(grammar_of(STORY), begun=True)
    for num_left in (20, 40):
        _, has_ended, is_shortened = sampled(
            grammar, len(begin) + num_left, behind(begin, by_chance(num_left, b"a", b"b"))
        )
        assert has_ended and is_shortened


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_of_tools_end_and_their_arguments_follow_the_schemas(tool_format: str) -> None:
    answers = AnswerFormat(TOKENIZER, find_tool_format(tool_format), None)
    schemas = {tool.name: json.loads(tool.schema) for tool in TOOLS}
    use = ToolUse(TOOLS, "required")
    num_shortened = 0
    for seed in range(SEEDS):
        tokens, has_ended, is_shortened = sampled(answers.grammar(use, begun=False), 120, by_chance(seed))
        assert has_ended, TOKENIZER.decode(tokens)
        reader = answers.reader(use, begun=False)
        pieces = joined([*reader.push(TOKENIZER.decode(tokens)), *reader.finish()])
        assert {type(piece) for piece in pieces} == {CallStart, Arguments}, pieces
        for start, arguments in zip(pieces[::2], pieces[1::2], strict=True):
            assert isinstance(start, CallStart) and isinstance(arguments, Arguments)
            jsonschema.validate(json.loads(arguments.text), schemas[start.name])
        num_shortened += is_shortened
    assert num_shortened > SEEDS // 6


def after(text: str, choose: Choose) -> Choose:
    """The tokens of `text` first, each of which must be allowed."""
    return behind(VOCABULARY.tokenize_str(text), choose)


def behind(begin: list[int], choose: Choose) -> Choose:
    tokens = iter(begin)

    def choose_next(allowed: list[int]) -> int:
        token = next(tokens, None)
        assert token is None or token in allowed, JSON_VOCABULARY.text(token)
        return choose(allowed) if token is None else token

    return choose_next


def pieces_of(answers: AnswerFormat, use: ToolUse | None, tokens: list[int]) -> list[Any]:
    reader = answers.reader(use, begun=False)
    return joined([*reader.push(TOKENIZER.decode(tokens)), *reader.finish()])


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_behind_free_text_end_and_their_arguments_follow_the_schema(tool_format: str) -> None:
    answers, use = AnswerFormat(TOKENIZER, find_tool_format(tool_format), None), ToolUse(TOOLS)
    # Formats whose calls are all of an answer take no text before them.
    before = 'I say "look, and ' if tool_format in ("hermes", "mistral", "mistral_args") else ""
    call = answers.tool_format.written_calls([Call("set_number", '{"a-b": 1}')])
    num_shortened = 0
    for seed in range(SEEDS):
        text = before + call[: call.index("1")]
        num_begun = len(VOCABULARY.tokenize_str(text))
        limit = num_begun + 20 + 9 * (seed * 12 // SEEDS)
        tokens, has_ended, is_shortened = sampled(
            answers.grammar(use, begun=False), limit, after(text, by_chance(seed))
        )
        assert has_ended, TOKENIZER.decode(tokens)
        pieces = pieces_of(answers, use, tokens)
        (arguments, *_) = [piece.text for piece in pieces if isinstance(piece, Arguments)]
        jsonschema.validate(json.loads(arguments), NUMBER)
        num_shortened += is_shortened
    assert num_shortened > SEEDS // 6


def test_free_text_in_which_no_call_begins_keeps_its_masks() -> None:
    answers, use = AnswerFormat(TOKENIZER, find_tool_format("hermes"), None), ToolUse(TOOLS)
    grammar = answers.grammar(use, begun=False)
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
    ending, bits = ending_of(grammar, 60), np.zeros(NUM_WORDS, np.uint32)
    for position in range(60):
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        expected = bits.copy()
        assert not ending.narrow(bits, position) and np.array_equal(bits, expected)
        (token,) = VOCABULARY.tokenize_str('"') if position % 7 == 3 else [random.Random(position).randrange(300, 600)]
        assert matcher.try_consume_tokens([token]) == 1
        ending.append([token], position)
    assert ending.place.path is None


@pytest.mark.parametrize("what", ["calls", "schema"])
def test_json_behind_reasoning_ends_and_validates(what: str) -> None:
    answers = AnswerFormat(TOKENIZER, find_tool_format("hermes"), ReasoningMarks())
    use = ToolUse(TOOLS, "required") if what == "calls" else None
    num_shortened = 0
    for seed in range(SEEDS):
        schema = unbounded(random.Random(seed))
        grammar = answers.after_reasoning(grammar_of(schema), begun=False)
        grammar = grammar if use is None else answers.grammar(use, begun=False)
        thought = f'<think>I must "look at it{" again" * (seed % 4)}😀</think>'
        limit = len(VOCABULARY.tokenize_str(thought)) + 120
        tokens, has_ended, is_shortened = sampled(grammar, limit, after(thought, by_chance(seed)))
        assert has_ended, TOKENIZER.decode(tokens)
        pieces = pieces_of(answers, use, tokens)
        (answer, *_) = [piece.text for piece in pieces if isinstance(piece, Arguments if use else Content)]
        jsonschema.validate(json.loads(answer), {} if use else schema)
        num_shortened += is_shortened
    assert num_shortened > SEEDS // 6


@pytest.mark.parametrize(
    ("begins", "mode"),
    [
        ('I think "so.</think>', None),
        ('I think.</think><tool_call>\n{"name": "write", "arguments": ', "required"),
        ('<tool_call>\n{"name": "write", "arguments": ', "auto"),
        ('Say: "a > b😀<tool_call>\n{"name": "write", "arguments": ', "auto"),
    ],
)
@pytest.mark.parametrize("num_left", [30, 60, 150])
def test_a_string_that_began_long_before_the_limit_ends(begins: str, mode: Any, num_left: int) -> None:
    marks = ReasoningMarks() if "</think>" in begins else None
    answers = AnswerFormat(TOKENIZER, find_tool_format("hermes"), marks)
    if mode is None:
        grammar = answers.after_reasoning(grammar_of(STORY), begun=True)
    else:
        grammar = answers.grammar(ToolUse((Tool("write", None, json.dumps(STORY)),), mode), begun=marks is not None)
    text = begins + '{"story": "' + LONG_STORY
    letters = by_chance(num_left, *(bytes([char]) for char in range(97, 123)))
    limit = len(VOCABULARY.tokenize_str(text)) + num_left
    assert ending_of(grammar, limit).first_watched > len(VOCABULARY.tokenize_str(begins)) + 8
    tokens, has_ended, is_shortened = sampled(grammar, limit, after(text, letters))
    assert has_ended and is_shortened, TOKENIZER.decode(tokens)
    answer = TOKENIZER.decode(tokens)[len(begins) :].removesuffix("</tool_call>").removesuffix("}" if mode else "")
    jsonschema.validate(json.loads(answer), STORY)


@pytest.mark.parametrize("num_left", [20, 40, 300])
def test_the_mark_that_opens_reasoning_is_allowed(num_left: int) -> None:
    answers = AnswerFormat(TOKENIZER, find_tool_format("hermes"), ReasoningMarks())
    text = '<think>ok</think>{"a-b": 1}'
    grammar = answers.after_reasoning(grammar_of(NUMBER), begun=False)
    limit = len(VOCABULARY.tokenize_str(text)) + num_left
    tokens, has_ended, is_shortened = sampled(grammar, limit, after(text, min))
    assert has_ended and not is_shortened and TOKENIZER.decode(tokens) == text


@pytest.mark.parametrize("num_left", range(6))
def test_a_character_of_several_tokens_in_free_text_keeps_its_masks(num_left: int) -> None:
    answers, use = AnswerFormat(TOKENIZER, find_tool_format("hermes"), None), ToolUse(TOOLS)
    text = "All is well, my friend 😀"
    limit = len(VOCABULARY.tokenize_str(text)) + num_left
    ending = partial(ending_of, answers.grammar(use, begun=False), limit)
    for num_watched in range(1, 9):
        with patch(
            f"{__name__}.ending_of", lambda *_, first=limit - num_watched: replace(ending(), first_watched=first)
        ):
            tokens, _, is_shortened = sampled(answers.grammar(use, begun=False), limit, after(text, min))
        assert not is_shortened and TOKENIZER.decode(tokens).startswith(text)


def test_the_description_of_many_tools_has_room_beside_their_grammar() -> None:
    answers = AnswerFormat(TOKENIZER, find_tool_format("hermes"), None)
    fields = {f"field_{i}": {"type": "string", "description": "A text that is needed. " * 4} for i in range(10)}
    schema = json.dumps({"type": "object", "properties": fields, "required": ["field_1", "field_2"]})
    tools = tuple(Tool(f"tool_{i}", None, schema) for i in range(100))
    grammar = answers.grammar(ToolUse(tools, "required"), begun=False)
    assert len(grammar) + 100 * len(schema) > MAX_GRAMMAR_BYTES
    tokens, has_ended, is_shortened = sampled(grammar, 600, by_chance(0, b"a"))
    assert has_ended and is_shortened, TOKENIZER.decode(tokens)


def test_json_beside_calls_ends_and_validates() -> None:
    answers, use = AnswerFormat(TOKENIZER, find_tool_format("hermes"), None), ToolUse(TOOLS)
    for seed in range(SEEDS):
        grammar = answers.grammar_or(use, grammar_of(NUMBER), "response_format", begun=False)
        tokens, has_ended, _ = sampled(grammar, 40 + 5 * (seed * 12 // SEEDS), after('{"a-b', by_chance(seed)))
        assert has_ended, TOKENIZER.decode(tokens)
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), NUMBER)


@pytest.mark.parametrize("begin", range(0, 40, 7))
def test_an_answer_is_followed_from_any_token_on_with_the_same_masks(begin: int) -> None:
    """As when a matcher is made anew from the same tokens, or drafts are checked."""
    answers, use = AnswerFormat(TOKENIZER, find_tool_format("hermes"), None), ToolUse(TOOLS)
    grammar, limit = answers.grammar(use, begun=False), 90
    call = answers.tool_format.written_calls([Call("set_number", '{"a-b": 1}')])
    tokens, _, _ = sampled(grammar, limit, after('I "say ' + call[: call.index("1")], by_chance(3)))
    masks, num_narrowed = [], 0
    for is_anew in (False, True):
        matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
        ending, bits = ending_of(grammar, limit), np.zeros(NUM_WORDS, np.uint32)
        if is_anew:
            assert matcher.try_consume_tokens(tokens[:begin]) == begin
            ending.append(tokens[:begin], 0)
        found = []
        for position in range(begin if is_anew else 0, len(tokens)):
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            ahead = bits.copy()
            ending.narrow(bits, position)
            num_narrowed += not np.array_equal(bits, ahead)
            found.append(bits.tolist())
            drafts = tokens[position : position + 3]
            drafted, ending_of_drafts = matcher.deep_copy(), ending.copy()
            assert drafted.try_consume_tokens(drafts) == len(drafts)
            drafted.unsafe_compute_mask_ptr(ahead.ctypes.data, ahead.nbytes)
            ending_of_drafts.append(drafts, position)
            ending_of_drafts.narrow(ahead, position + len(drafts))  # which changes nothing of what follows
            assert matcher.try_consume_tokens(tokens[position : position + 1]) == 1
            ending.append(tokens[position : position + 1], position)
        masks.append(found)
    assert masks[0][begin:] == masks[1]
    assert num_narrowed


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
