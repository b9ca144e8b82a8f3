"""Answers of JSON schemas come to their end before the limit, whatever tokens are sampled, and only there."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from llama_core.execution import json_ending
from llama_core.execution.grammar_masks import SlotGrammars
from llama_core.execution.json_ending import JsonEnding, JsonText, JsonVocabulary, Lookahead, tokens_of
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.grammar import begins_with_text, checked_grammar, json_description, json_schema_grammar, limits
from llama_core.text.grammar_vocabulary import grammar_vocabulary
from llama_core.text.reasoning import ReasoningMarks
from llama_core.text.registry import load_tokenizer
from llama_core.text.tools.pieces import Arguments, CallStart, Content, joined
from llama_core.text.tools.registry import find_tool_format
from llama_core.text.tools.tool import Call, ToolUse
from tests.programs.structured_output import bounded, unbounded
from tests.support.tool_calls import FORMATS, NUMBER, TOOLS

TOKENIZER = load_tokenizer(Path(__file__).parents[3] / "demo" / "tokenizer.model")
NUM_WORDS = -(-TOKENIZER.n_words // 32)
VOCABULARY = grammar_vocabulary(TOKENIZER, TOKENIZER.stop_ids)
JSON_VOCABULARY = JsonVocabulary(VOCABULARY, NUM_WORDS)


def ending_of(grammar: str, limit: int) -> JsonEnding:
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
    has_text = begins_with_text(grammar)
    ahead = Lookahead(matcher, JSON_VOCABULARY, json_description(grammar), begins_with_text=has_text)
    return JsonEnding.of(ahead, 0, limit)


Choose = Callable[[list[int]], int]


def by_chance(seed: int, *preferred: bytes) -> Choose:
    """A token whose text is preferred, if one is allowed; else any."""
    draw = random.Random(seed)

    def choose(allowed: list[int]) -> int:
        first = [token for token in allowed if JSON_VOCABULARY.text(token) in preferred]
        return draw.choice(first or allowed)

    return choose


def sampled(grammar: str, limit: int, choose: Choose) -> tuple[list[int], bool, bool]:
    """The chosen tokens; whether the answer ended, and whether a text was lost."""
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
    ending, bits = ending_of(grammar, limit), np.zeros(NUM_WORDS, np.uint32)
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
    for seed in range(40):
        schema = (bounded if kind == "bounded" else unbounded)(random.Random(seed))
        limit = (160, 400)[seed % 2] if kind == "bounded" else (40, 64, 100)[seed % 3]
        tokens, has_ended, is_shortened = sampled(grammar_of(schema), limit, by_chance(seed))
        assert has_ended, (schema, TOKENIZER.decode(tokens))
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)
        num_shortened += is_shortened
    assert (num_shortened > 10) if kind == "unbounded" else (num_shortened < 20)


def test_an_answer_far_from_its_limit_is_left_alone() -> None:
    for seed in range(30):
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
    assert not ending.narrow(bits, ending.first_watched) and ending.could_end is False
    with patch.object(JsonEnding, "_closing_path", side_effect=AssertionError):
        assert not ending.narrow(bits, ending.first_watched + 1)


def test_an_answer_that_takes_long_at_least_is_not_watched() -> None:
    ending = ending_of(grammar_of({"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 5000}), 200)
    assert ending.first_watched == 200


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
    for seed in range(12):
        grammar = grammar_of(schema)
        tokens, has_ended, _ = sampled(grammar, 120 + seed, by_chance(seed, *preferred))
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


def test_looking_ahead_beyond_the_limits_of_a_grammar_breaks_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = grammar_of({"type": "array", "items": {"type": "string"}})
    grammars = SlotGrammars(lambda: VOCABULARY, TOKENIZER.n_words, 2, 4096)
    text = VOCABULARY.tokenize_str('["some words of a text')
    known = torch.zeros((2, 4096), dtype=torch.int64)
    known[0, : 1 + len(text)] = torch.tensor([1, *text])

    def mask(max_tokens: int) -> np.ndarray:
        params = SamplingParams(max_tokens=max_tokens, grammar=grammar)
        grammars.admit(SlotInit(0, [1, *text], [], params, prompt_length=1))
        masks = grammars.begin([Row(0, 0, 1 + len(text), True)], known)
        assert masks is not None
        masks.wait()
        assert masks.reasons == {}
        bits: np.ndarray = masks.bits[0]
        return bits

    def exceeding(vocabulary: object, matcher: LLMatcher, *_: object) -> None:
        assert not matcher.consume_token(0) and matcher.is_error()  # no text has this token

    expected, closing = mask(4000), mask(len(text) + 3)
    assert expected.any() and not np.array_equal(closing, expected)
    with monkeypatch.context() as patched:
        patched.setattr(json_ending, "closing_path", exceeding)
        assert np.array_equal(mask(len(text) + 3), expected), "the answer is left as it is"
    assert np.array_equal(mask(len(text) + 3), closing), "the grammar is compiled again for looking ahead"
    grammars.close()


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_of_tools_end_and_their_arguments_follow_the_schemas(tool_format: str) -> None:
    answers = AnswerFormat(TOKENIZER, find_tool_format(tool_format), None)
    schemas = {tool.name: json.loads(tool.schema) for tool in TOOLS}
    use = ToolUse(TOOLS, "required")
    num_shortened = 0
    for seed in range(12):
        tokens, has_ended, is_shortened = sampled(answers.grammar(use, begun=False), 120, by_chance(seed))
        assert has_ended, TOKENIZER.decode(tokens)
        reader = answers.reader(use, begun=False)
        pieces = joined([*reader.push(TOKENIZER.decode(tokens)), *reader.finish()])
        assert {type(piece) for piece in pieces} == {CallStart, Arguments}, pieces
        for start, arguments in zip(pieces[::2], pieces[1::2], strict=True):
            assert isinstance(start, CallStart) and isinstance(arguments, Arguments)
            jsonschema.validate(json.loads(arguments.text), schemas[start.name])
        num_shortened += is_shortened
    assert num_shortened > 2


def after(text: str, choose: Choose) -> Choose:
    """The tokens of `text` first."""
    tokens = iter(VOCABULARY.tokenize_str(text))
    return lambda allowed: next(tokens, None) or choose(allowed)


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
    for seed in range(12):
        text = before + call[: call.index("1")]
        num_begun = len(VOCABULARY.tokenize_str(text))
        limit = num_begun + 20 + 9 * seed
        tokens, has_ended, is_shortened = sampled(
            answers.grammar(use, begun=False), limit, after(text, by_chance(seed))
        )
        assert has_ended, TOKENIZER.decode(tokens)
        pieces = pieces_of(answers, use, tokens)
        (arguments, *_) = [piece.text for piece in pieces if isinstance(piece, Arguments)]
        jsonschema.validate(json.loads(arguments), NUMBER)
        num_shortened += is_shortened
    assert num_shortened > 2


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
    assert ending.could_end is None


@pytest.mark.parametrize("what", ["calls", "schema"])
def test_json_behind_reasoning_ends_and_validates(what: str) -> None:
    answers = AnswerFormat(TOKENIZER, find_tool_format("hermes"), ReasoningMarks())
    use = ToolUse(TOOLS, "required") if what == "calls" else None
    for seed in range(12):
        schema = bounded(random.Random(seed))
        grammar = answers.after_reasoning(grammar_of(schema), begun=False)
        grammar = grammar if use is None else answers.grammar(use, begun=False)
        thought = f'<think>I must "look at it{" again" * (seed % 4)}</think>'
        limit = len(VOCABULARY.tokenize_str(thought)) + 160
        tokens, has_ended, _ = sampled(grammar, limit, after(thought, by_chance(seed)))
        assert has_ended, TOKENIZER.decode(tokens)
        pieces = pieces_of(answers, use, tokens)
        (answer, *_) = [piece.text for piece in pieces if isinstance(piece, Arguments if use else Content)]
        jsonschema.validate(json.loads(answer), {} if use else schema)


def test_json_beside_calls_ends_and_validates() -> None:
    answers, use = AnswerFormat(TOKENIZER, find_tool_format("hermes"), None), ToolUse(TOOLS)
    for seed in range(12):
        grammar = answers.grammar_or(use, grammar_of(NUMBER), "response_format", begun=False)
        tokens, has_ended, _ = sampled(grammar, 40 + 5 * seed, after('{"a-b', by_chance(seed)))
        assert has_ended, TOKENIZER.decode(tokens)
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), NUMBER)


@pytest.mark.parametrize("begin", range(0, 40, 7))
def test_an_answer_is_followed_from_any_token_on_with_the_same_masks(begin: int) -> None:
    """As when a matcher is made anew from the same tokens, or drafts are checked."""
    answers, use = AnswerFormat(TOKENIZER, find_tool_format("hermes"), None), ToolUse(TOOLS)
    grammar, limit = answers.grammar(use, begun=False), 90
    call = answers.tool_format.written_calls([Call("set_number", '{"a-b": 1}')])
    tokens, _, _ = sampled(grammar, limit, after('I "say ' + call[: call.index("1")], by_chance(3)))
    masks = []
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
            found.append(bits.tolist())
            drafts = tokens[position : position + 3]
            assert matcher.try_consume_tokens(drafts) == len(drafts)
            matcher.unsafe_compute_mask_ptr(ahead.ctypes.data, ahead.nbytes)
            matcher.rollback(len(drafts))
            ending.narrow(ahead, position + len(drafts), drafts)  # which changes nothing of what follows
            assert matcher.try_consume_tokens(tokens[position : position + 1]) == 1
            ending.append(tokens[position : position + 1], position)
        masks.append(found)
    assert masks[0][begin:] == masks[1]


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
