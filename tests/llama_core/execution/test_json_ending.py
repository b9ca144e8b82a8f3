"""Answers of JSON schemas come to their end before the limit, whatever tokens are sampled, and only there."""

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from llama_core.execution.json_ending import JsonEnding, JsonText, JsonVocabulary
from llama_core.text.grammar import checked_grammar, json_schema_grammar, limits
from llama_core.text.grammar_vocabulary import grammar_vocabulary
from llama_core.text.registry import load_tokenizer
from tests.programs.structured_output import bounded, unbounded

TOKENIZER = load_tokenizer(Path(__file__).parents[3] / "demo" / "tokenizer.model")
NUM_WORDS = -(-TOKENIZER.n_words // 32)
VOCABULARY = grammar_vocabulary(TOKENIZER, TOKENIZER.stop_ids)
JSON_VOCABULARY = JsonVocabulary(VOCABULARY, NUM_WORDS)


def sampled(schema: object, limit: int, seed: int) -> tuple[list[int], bool, bool]:
    """Tokens by chance among those allowed; whether the answer ended, and whether a mask was narrowed."""
    grammar = checked_grammar(json_schema_grammar(schema), "g")  # type: ignore[arg-type]
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
    ending = JsonEnding.of_schema(json.dumps(schema), JSON_VOCABULARY, limit)
    draw, bits = np.random.default_rng(seed), np.zeros(NUM_WORDS, np.uint32)
    tokens: list[int] = []
    was_narrowed = False
    for position in range(limit):
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if ending.is_near(position):
            was_narrowed |= ending.narrow(bits, matcher, [], position)
        token = int(draw.choice(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))))
        if token in TOKENIZER.stop_ids:
            return tokens, True, was_narrowed
        assert matcher.try_consume_tokens([token]) == 1
        tokens.append(token)
        ending.append([token])
    return tokens, False, was_narrowed


@pytest.mark.parametrize("kind", ["bounded", "unbounded"])
def test_random_answers_end_and_validate(kind: str) -> None:
    num_narrowed = 0
    for seed in range(120):
        schema = (bounded if kind == "bounded" else unbounded)(random.Random(seed))
        limit = (160, 400)[seed % 2] if kind == "bounded" else (40, 64, 100)[seed % 3]
        tokens, has_ended, was_narrowed = sampled(schema, limit, seed)
        assert has_ended, (schema, TOKENIZER.decode(tokens))
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens)), schema)
        num_narrowed += was_narrowed
    assert (num_narrowed > 60) if kind == "unbounded" else (num_narrowed < 60)


def test_an_answer_far_from_its_limit_is_left_alone() -> None:
    for seed in range(60):
        schema = bounded(random.Random(seed))
        tokens, has_ended, _ = sampled(schema, 4000, seed)
        assert has_ended
        again, _, was_narrowed = sampled(schema, len(tokens) + 100, seed)
        assert again == tokens and not was_narrowed


def test_an_answer_that_cannot_end_in_time_is_left_alone() -> None:
    schema = {"const": "a text of more tokens than are left"}
    tokens, has_ended, was_narrowed = sampled(schema, 6, 0)
    assert len(tokens) == 6 and not has_ended and not was_narrowed


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
