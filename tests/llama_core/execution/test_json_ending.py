"""Answers of JSON schemas come to their end before the limit, whatever tokens are sampled, and only there."""

import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from llama_core.execution.json_ending import JsonEnding, JsonText, JsonVocabulary
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.grammar import checked_grammar, json_description, json_schema_grammar, limits
from llama_core.text.grammar_vocabulary import grammar_vocabulary
from llama_core.text.registry import load_tokenizer
from llama_core.text.tools.pieces import Arguments, CallStart, joined
from llama_core.text.tools.registry import find_tool_format
from llama_core.text.tools.tool import ToolUse
from tests.programs.structured_output import bounded, unbounded
from tests.support.tool_calls import FORMATS, TOOLS

TOKENIZER = load_tokenizer(Path(__file__).parents[3] / "demo" / "tokenizer.model")
NUM_WORDS = -(-TOKENIZER.n_words // 32)
VOCABULARY = grammar_vocabulary(TOKENIZER, TOKENIZER.stop_ids)
JSON_VOCABULARY = JsonVocabulary(VOCABULARY, NUM_WORDS)


def sampled(grammar: str, limit: int, seed: int) -> tuple[list[int], bool, bool]:
    """Tokens by chance among those allowed; whether the answer ended, and whether a mask was narrowed."""
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
    ending = JsonEnding.of(json_description(grammar), JSON_VOCABULARY, 0, limit)
    draw, bits = np.random.default_rng(seed), np.zeros(NUM_WORDS, np.uint32)
    tokens: list[int] = []
    was_narrowed = False
    for position in range(limit):
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if position >= ending.first:
            was_narrowed |= ending.narrow(bits, matcher, position)
        token = int(draw.choice(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))))
        if token in TOKENIZER.stop_ids:
            return tokens, True, was_narrowed
        assert matcher.try_consume_tokens([token]) == 1
        tokens.append(token)
        ending.append([token])
    return tokens, False, was_narrowed


def grammar_of(schema: Any) -> str:
    return checked_grammar(json_schema_grammar(schema), "g")


@pytest.mark.parametrize("kind", ["bounded", "unbounded"])
def test_random_answers_end_and_validate(kind: str) -> None:
    num_narrowed = 0
    for seed in range(60):
        schema = (bounded if kind == "bounded" else unbounded)(random.Random(seed))
        limit = (160, 400)[seed % 2] if kind == "bounded" else (40, 64, 100)[seed % 3]
        tokens, has_ended, was_narrowed = sampled(grammar_of(schema), limit, seed)
        assert has_ended, (schema, TOKENIZER.decode(tokens))
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)
        num_narrowed += was_narrowed
    assert (num_narrowed > 30) if kind == "unbounded" else (num_narrowed < 30)


def test_an_answer_far_from_its_limit_is_left_alone() -> None:
    for seed in range(60):
        grammar = grammar_of(bounded(random.Random(seed)))
        tokens, has_ended, _ = sampled(grammar, 4000, seed)
        assert has_ended
        again, _, was_narrowed = sampled(grammar, len(tokens) + 100, seed)
        assert again == tokens and not was_narrowed


def test_an_answer_that_cannot_end_in_time_is_left_alone() -> None:
    grammar = grammar_of({"const": "a text of more tokens than are left"})
    tokens, has_ended, was_narrowed = sampled(grammar, 6, 0)
    assert len(tokens) == 6 and not has_ended and not was_narrowed


def test_whether_an_answer_can_end_is_found_once() -> None:
    """Else each of its tokens would cost as much as following its whole grammar."""
    grammar = grammar_of({"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 500})
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
    ending = JsonEnding.of(json_description(grammar), JSON_VOCABULARY, 0, 200)
    bits = np.zeros(NUM_WORDS, np.uint32)
    matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    assert not ending.narrow(bits, matcher, ending.first) and ending.can_end is False
    with patch.object(JsonEnding, "_shortest", side_effect=AssertionError):
        assert not ending.narrow(bits, matcher, ending.first + 1)


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_of_tools_end_and_their_arguments_follow_the_schemas(tool_format: str) -> None:
    answers = AnswerFormat(TOKENIZER, find_tool_format(tool_format), None)
    schemas = {tool.name: json.loads(tool.schema) for tool in TOOLS}
    use = ToolUse(TOOLS, "required")
    num_narrowed = 0
    for seed in range(12):
        tokens, has_ended, was_narrowed = sampled(answers.grammar(use, begun=False), 120, seed)
        assert has_ended, TOKENIZER.decode(tokens)
        reader = answers.reader(use, begun=False)
        pieces = joined([*reader.push(TOKENIZER.decode(tokens)), *reader.finish()])
        assert {type(piece) for piece in pieces} == {CallStart, Arguments}, pieces
        for start, arguments in zip(pieces[::2], pieces[1::2], strict=True):
            assert isinstance(start, CallStart) and isinstance(arguments, Arguments)
            jsonschema.validate(json.loads(arguments.text), schemas[start.name])
        num_narrowed += was_narrowed
    assert num_narrowed > 2


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
