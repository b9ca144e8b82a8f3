"""Lists with unique items: masks lose what repeats an item, and nothing else, by a slow reference over random vocabularies."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from llama_core.execution.grammars.item_text import UniqueLists
from llama_core.execution.grammars.json_vocabulary import JsonVocabulary, tokens_of
from llama_core.execution.grammars.masks import SlotGrammars
from llama_core.execution.grammars.rows import GrammarMasks
from llama_core.execution.grammars.unique_items import ItemTokens, UniqueItems
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Draft, Row, SlotInit
from llama_core.text.grammar import checked_grammar, json_schema_grammar, limits, unique_lists_of
from llama_core.text.grammar_vocabulary import grammar_vocabulary
from llama_core.text.registry import load_tokenizer
from tests.support.full_runs import examples

TEXT, INTEGER, NUMBER, NULL = ({"type": kind} for kind in ("string", "integer", "number", "null"))


def unique(items: Any, **keys: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **keys}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


class Vocabulary:
    """Bytes as the first 256 tokens, then texts, then the end."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.tokens = [*(bytes([i]) for i in range(256)), *(text.encode() for text in texts), b"<end>"]
        self.end = len(self.tokens) - 1
        self.eos_token_id = self.bos_token_id = self.end
        self.special_token_ids = [self.end]
        self.tokenizer = LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=[self.end])
        self.num_words = -(-len(self.tokens) // 32)
        self.items = ItemTokens(JsonVocabulary(self.tokenizer, self.num_words))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Answer:
    """An answer that follows a schema, and what its next tokens may be."""

    def __init__(self, schema: Any, vocabulary: Vocabulary) -> None:
        grammar = checked_grammar(json_schema_grammar(schema), "g")
        self.vocabulary, self.text = vocabulary, b""
        self.matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits())
        assert not self.matcher.is_error()
        self.unique = UniqueItems.of(vocabulary.items, UniqueLists(unique_lists_of(grammar)))

    def write(self, text: bytes, *tokens: int) -> "Answer":
        for token in (*text, *tokens):
            assert self.matcher.try_consume_tokens([token]) == 1, (self.text, token)
            self.unique.append([token])
            self.text += self.vocabulary.tokens[token]
        return self

    def masks(self) -> tuple[list[int], list[int]]:
        """The tokens that the grammar allows, and those that are left."""
        bits = np.zeros(self.vocabulary.num_words, np.uint32)
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        allowed = tokens_of(bits)
        self.unique.narrow(bits, self.matcher)
        return allowed, tokens_of(bits)

    def left(self) -> set[bytes]:
        return {self.vocabulary.tokens[token] for token in self.masks()[1]}


_IN_NUMBER = b"0123456789+-.eE"
_IN_EXPONENT = re.compile(rb"[0-9][eE][-+]?[0-9]*\Z")  # where a number may have no other value than an earlier one
_AT_NUMBER = re.compile(rb"[-0-9][-+.eE0-9]*\Z")
_WORDS = {word[:i]: word[i:] for word in (b"true", b"false", b"null") for i in range(1, len(word))}


def repeats(verdict: Any, before: bytes, new: bytes) -> bool:
    """Whether the part of a text that is complete holds an item twice: found by closing it behind each of its new characters.
    Without them it holds none twice."""
    text = before + new
    for end in range(max(len(before), 1), len(text) + 1):
        part = text[:end]
        if _AT_NUMBER.search(part) and (end == len(text) or text[end] in _IN_NUMBER):
            continue
        if end == len(text) and (word := re.search(rb"[a-z]+\Z", part)) is not None and word[0] in _WORDS:
            part += _WORDS[word[0]]
        try:
            value = json.loads(part + closing(part))
        except ValueError:
            continue
        if any(error.validator == "uniqueItems" for error in flat(verdict.iter_errors(value))):
            return True
    return False


def closing(part: bytes) -> bytes:
    open_ones = b""
    for char in re.sub(rb'"(?:[^"\\]|\\.)*"', b"", part):
        if char in b"[{":
            open_ones = {ord("["): b"]", ord("{"): b"}"}[char] + open_ones
        elif char in b"]}":
            open_ones = open_ones[1:]
    return open_ones


def flat(errors: Any) -> Iterator[Any]:
    for error in errors:
        yield error
        yield from flat(error.context)


SCHEMAS: dict[str, dict[str, Any]] = {
    "texts": unique(TEXT),
    "numbers": unique(NUMBER),
    "texts, numbers and words": unique({"type": ["string", "number", "boolean", "null"]}),
    "alternatives of items": unique({"anyOf": [TEXT, {"$ref": "#/$defs/n"}]}) | {"$defs": {"n": NUMBER}},
    "in an object": closed(a=unique(TEXT), b={"type": "array", "items": TEXT}),
    "lists of them": {"type": "array", "items": unique({"type": ["string", "null"]})},
    "by other names": {"type": "object", "additionalProperties": unique(TEXT), "properties": {"a": TEXT}},
    "an optional one": {"anyOf": [unique(TEXT), NULL]},
    "behind the first item": {"type": "array", "prefixItems": [{"type": "array", "items": TEXT}], "items": unique(TEXT)},
    "a tree": {
        "$ref": "#/$defs/t",
        "$defs": {"t": closed(b=unique(TEXT), a={"type": "array", "items": {"$ref": "#/$defs/t"}})},
    },
}  # fmt: skip
PIECES = st.lists(st.sampled_from(
    ['"', '",', '","', '"a"', "a", "b", ",", "[", "]", "[]", '["', '"]', "\\", "\\u006", "\\u0061", "1", "0", ".", ".0", "1,",
     "e", "e0", "-", "null", "n", "true", "false", " ", '"a', 'a"', '","a"', "1 ", "{", "}", ":", '":[', '"b', '"b":["a","a'],
), min_size=1, max_size=4).map("".join)  # fmt: skip


@settings(max_examples=examples(30, 300), deadline=None, derandomize=True, database=None)
@given(st.sampled_from(sorted(SCHEMAS)), st.lists(PIECES, max_size=24, unique=True), st.integers(0, 2**32))
def test_only_tokens_that_repeat_an_item_are_dropped(name: str, texts: list[str], seed: int) -> None:
    vocabulary, draw, verdict = Vocabulary(texts), random.Random(seed), jsonschema.Draft202012Validator(SCHEMAS[name])
    answer = Answer(SCHEMAS[name], vocabulary)
    for _ in range(40):
        allowed, left = answer.masks()
        # Few characters, so that items repeat.
        liked = [token for token in allowed if token >= 256 or token in b'"\\ab10.,]u6-n{:[ \ntf']
        for token in liked:
            again = token != vocabulary.end and repeats(verdict, answer.text, vocabulary.tokens[token])
            text = answer.text + vocabulary.tokens[token]
            assert (token in left) != again or _IN_EXPONENT.search(text), (answer.text, vocabulary.tokens[token])
            assert not again or token not in left
        assert {token for token in allowed if token not in (*liked, *b"0123456789eE")} <= set(left)
        likely = [token for token in liked if token in left and (token >= 256 or token in b'"a1,')]
        token = draw.choice(likely if likely and draw.random() < 0.8 else left)
        if token == vocabulary.end:
            verdict.validate(json.loads(answer.text))
            break
        answer.write(b"", token)


PLAIN = Vocabulary(['"a', 'a"', '","', '","a"', "\\u0061", 'b","a', "null", '"",""', '["a","a"'])


ENDS = {b'"', b'","', b'","a"'}


@pytest.mark.parametrize(
    ("items", "text", "dropped"),
    [
        pytest.param(TEXT, '["a","a', ENDS, id="a text"),
        pytest.param(TEXT, '["ab","a', {b'b","a', b'","a"'}, id="a token with the rest and the next item"),
        pytest.param(TEXT, '["a","', {b'a"', b'","a"'}, id="a token with the text and its end"),
        pytest.param(TEXT, '["a","b', {b'","a"'}, id="a token with the next item"),
        pytest.param(TEXT, "[", {b'"",""'}, id="a token with two items"),
        pytest.param(TEXT, "", {b'["a","a"'}, id="a token with a list of two items"),
        pytest.param(TEXT, r'["\n","\u000a', ENDS, id="an escape"),
        pytest.param(TEXT, r'["\n","\u000', {b'a"'}, id="a token with the rest of an escape"),
        pytest.param(TEXT, r'["\\n","\\n', ENDS, id="escaped backslashes"),
        pytest.param(TEXT, r'["\n","\\n', set(), id="a line and a backslash"),
        pytest.param(TEXT, '["é","é', ENDS, id="two bytes"),
        pytest.param(NUMBER, "[1,1.0", {b",", b"]", b" ", b"\n"}, id="a decimal"),
        pytest.param(NUMBER, "[100,1e2", {b",", b"]", b" ", b"\n"}, id="an exponent"),
        pytest.param(NUMBER, "[0,-0.0", {b",", b"]", b" ", b"\n", b"e", b"E"}, id="minus zero"),
        pytest.param(NUMBER, "[1,12", set(), id="a longer number"),
        pytest.param({"type": ["number", "null", "string"]}, "[null,", {b"n", b"null", b'"",""'}, id="a word"),
        pytest.param({"type": ["number", "boolean"]}, "[true,1", set(), id="true and 1"),
        pytest.param({"type": ["number", "string"]}, '["1",1', set(), id="a text of a digit"),
    ],
)  # fmt: skip
def test_items_that_are_equal_are_written_in_several_ways(items: Any, text: str, dropped: set[bytes]) -> None:
    answer = Answer(unique(items), PLAIN).write(text.encode())
    allowed, left = answer.masks()
    assert {PLAIN.tokens[token] for token in set(allowed) - set(left)} == dropped


def test_characters_of_two_escapes_are_followed() -> None:
    """llguidance allows none of these escapes; grammars of other schemas may."""
    unique_items = UniqueItems.of(PLAIN.items, UniqueLists({"root": [0], "states": [{"is_unique": True}]}))
    unique_items.append('["😀","\\ud83d\\ude0'.encode())
    assert unique_items.distinct(list(b'0"')) == [ord("0")]
    assert unique_items.distinct(list(b'1"')) == list(b'1"')


@pytest.mark.parametrize(
    ("items", "text", "dropped"),
    [
        (INTEGER, "[0,", b"0"),
        (INTEGER, "[0,-", b"0"),
        (INTEGER, "[1,", b""),
        (NUMBER, "[0,0", b"eE, \n]"),
        (NUMBER, "[100,1e00", b"2"),
        ({"type": "string", "maxLength": 2}, '["ab","a', b"b"),
        ({"type": "string", "pattern": "^(red|blue)$"}, '["red","', b"r"),
        ({"type": "string", "pattern": "^(red|blue)$"}, '["red","blue"', b","),
        ({"type": "string", "format": "date"}, '["2024-01-01","2024-01-0', b"1"),
    ],
)
def test_tokens_that_lead_to_no_other_item_are_dropped(items: Any, text: str, dropped: bytes) -> None:
    allowed, left = Answer(unique(items), PLAIN).write(text.encode()).masks()
    assert {token for token in set(allowed) - set(left) if token < 256} == set(dropped)


@pytest.mark.parametrize("items", [
    INTEGER,
    {"type": "integer", "minimum": 0, "maximum": 99},
    {"type": "string", "maxLength": 3},
    {"type": "string", "pattern": "^(a|b|ab|abc)$"},
    {"enum": [f"a{i}" for i in range(80)]},
])  # fmt: skip
def test_lists_of_few_values_end(items: Any) -> None:
    for seed in range(examples(3, 20)):
        draw, answer = random.Random(seed), Answer(unique(items, maxItems=20), PLAIN)
        for _ in range(120):
            left = answer.masks()[1]
            likely = [token for token in left if token < 256 and token in b'"a01,']
            token = draw.choice(likely if likely and draw.random() < 0.9 else left)
            if token == PLAIN.end:
                break
            answer.write(b"", token)
        closed_text = answer.text[: answer.text.rindex(b",")] + b"]" if b"," in answer.text else b"[]"
        value = json.loads(answer.text if token == PLAIN.end else closed_text)
        jsonschema.validate(value, unique(items, maxItems=20))


TOKENIZER = load_tokenizer(Path(__file__).parents[3] / "demo" / "tokenizer.model")
VOCABULARY = grammar_vocabulary(TOKENIZER, TOKENIZER.stop_ids)
SET = checked_grammar(json_schema_grammar(closed(names=unique(TEXT, minItems=2))), "g")


class Slot:
    """The only slot of `SlotGrammars`, with a prompt of one token."""

    def __init__(self, grammar: str, generated: Sequence[int] = (), max_tokens: int = 200) -> None:
        self.slots = SlotGrammars(lambda: VOCABULARY, TOKENIZER.n_words, 1, 4096)
        params = SamplingParams(grammar=grammar, max_tokens=max_tokens)
        self.slots.admit(SlotInit(0, [1, *generated], [], params, prompt_length=1))
        self.next = len(generated)

    def step(self, sampled: Sequence[int], drafts: Sequence[int] = ()) -> GrammarMasks:
        """The masks of one step, which samples these tokens."""
        if drafts:
            self.slots.propose(Draft(0, self.next + 1, list(drafts)))
        masks = self.slots.begin([Row(0, self.next, 1 + len(drafts), True, len(drafts))])
        assert masks is not None
        masks.wait()
        self.slots.follow(masks, partial(list, sampled))
        self.next += 1
        return masks


def test_masks_are_those_of_the_tokens_alone_with_drafts_and_after_a_failure() -> None:
    tokens = VOCABULARY.tokenize_str('{"names":["Tom","cat","Tom')
    slot = Slot(SET)
    one_by_one = [slot.step([token]).bits[0].tolist() for token in (*tokens, 0)]
    assert one_by_one[-1] == Slot(SET, tokens).step([0]).bits[0].tolist()
    drafted = Slot(SET, tokens[:3]).step([0] * (len(tokens) - 2), tokens[3:]).bits.tolist()
    assert drafted == one_by_one[3:]
    begins = [
        {TOKENIZER.token_bytes(token)[:1] for token in tokens_of(np.array(mask, np.uint32))} for mask in one_by_one
    ]
    assert b'"' in begins[-2] and b"s" in begins[-1] and b'"' not in begins[-1]


@pytest.mark.parametrize("items", [
    {"type": "string", "pattern": "^(a|b|ab|abc|once)$"}, {"type": "integer", "minimum": 0, "maximum": 70}
])  # fmt: skip
def test_masks_where_values_run_out_are_those_of_the_tokens_alone_and_leave_a_way(items: Any) -> None:
    grammar = checked_grammar(json_schema_grammar(unique(items)), "g")
    draw, slot, tokens, masks = random.Random(3), Slot(grammar), list[int](), list[list[int]]()
    for _ in range(90):
        step = slot.step(chosen := [0])
        assert step.reasons == {}, TOKENIZER.decode(tokens)
        masks.append(step.bits[0].tolist())
        left = tokens_of(step.bits[0])
        likely = [
            token for token in left if TOKENIZER.token_bytes(token) in (b'"', b"a", b"b", b",", b'","', b"1", b"2")
        ]
        tokens.append(draw.choice(likely or left))
        if tokens[-1] in TOKENIZER.stop_ids:
            break
        chosen[:] = tokens[-1:]
    for end in draw.sample(range(len(masks)), 12):
        assert Slot(grammar, tokens[:end]).step([0]).bits[0].tolist() == masks[end], TOKENIZER.decode(tokens[:end])


def test_a_draft_that_repeats_an_item_is_refused() -> None:
    tokens = VOCABULARY.tokenize_str('{"names":["Tom","Tom')
    repeated = VOCABULARY.tokenize_str('"]}')
    bits = Slot(SET, tokens).step([0] * (1 + len(repeated)), repeated).bits
    assert bits[0].any() and repeated[0] not in tokens_of(bits[0]) and not bits[1:].any()


def test_items_of_a_refused_draft_are_forgotten() -> None:
    tokens = VOCABULARY.tokenize_str('{"names":["Tom","cat')
    drafted = Slot(SET, tokens)
    drafted.step([VOCABULARY.tokenize_str("s")[0], 0], VOCABULARY.tokenize_str('"')[:1])
    ended = VOCABULARY.tokenize_str('s","Tom')
    for token in ended[1:]:
        drafted.step([token])
    assert drafted.step([0]).bits[0].tolist() == Slot(SET, [*tokens, *ended]).step([0]).bits[0].tolist()


def test_tokens_that_are_forced_repeat_no_item() -> None:
    grammar = checked_grammar(json_schema_grammar(unique({"type": "string", "pattern": "^(once upon|a time)$"})), "g")
    begun = VOCABULARY.tokenize_str('["once upon","')
    assert Slot(grammar, begun[:-1]).step([0]).reasons == {}
    [first] = VOCABULARY.tokenize_str("o")[:1]
    whole = checked_grammar(json_schema_grammar({"type": "array", "items": {"pattern": "^(once upon|a time)$"}}), "g")
    follows = [each.tokens for each in Slot(whole, [*begun, first]).step([0]).forced]
    assert follows and b'"' in b"".join(map(TOKENIZER.token_bytes, follows[0]))
    left = [each.tokens for each in Slot(grammar, [*begun, first]).step([0]).forced]
    assert not any(b'"' in TOKENIZER.token_bytes(token) for each in left for token in each)


def test_a_list_of_which_no_other_item_is_left_is_refused_in_words() -> None:
    grammar = checked_grammar(json_schema_grammar(unique({"type": "string", "maxLength": 0}, minItems=2)), "g")
    masks = Slot(grammar, VOCABULARY.tokenize_str('["","')).step([0])
    assert not masks.bits.any()
    assert masks.reasons == {0: "the grammar cannot be followed: no other item of a list with unique items is left"}


def test_a_grammar_whose_lists_are_no_lists_refuses_its_row() -> None:
    for lists in (1, {"root": [0], "states": []}, {"root": [0], "states": [{"names": 1}]}):
        masks = Slot(json.dumps(json.loads(SET) | {"unique_lists": lists}), VOCABULARY.tokenize_str('{"names":[')).step(
            [0]
        )
        assert masks.reasons == {0: "the grammar could not be followed"}


@pytest.mark.parametrize("limit", [18, 24, 60])
def test_answers_end_before_the_limit_without_an_item_twice(limit: int) -> None:
    ended = 0
    for seed in range(4):
        draw, slot, tokens = random.Random(seed), Slot(SET, max_tokens=limit), list[int]()
        while len(tokens) < limit:
            left = tokens_of(slot.step(chosen := [0]).bits[0])
            likely = [token for token in left if TOKENIZER.token_bytes(token) in (b'"', b"a", b'","', b",")]
            token = draw.choice(likely or left)
            if token in TOKENIZER.stop_ids:
                break
            tokens += [token]
            chosen[:] = [token]
        ended += len(tokens) < limit
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), closed(names=unique(TEXT, minItems=2)))
    assert ended
