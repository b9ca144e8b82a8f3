"""Looking ahead is bounded: by numbers of paths, and by llguidance's limits for a grammar."""

from functools import partial
from unittest.mock import Mock, patch

import numpy as np
import pytest
from llguidance import LLParserLimits

from llama_core.execution.grammars.closing_path import LimitsExceeded, Search
from llama_core.execution.grammars.follower import CompiledGrammars
from llama_core.execution.grammars.json_vocabulary import JsonVocabulary, tokens_of
from llama_core.execution.grammars.masks import SlotGrammars
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit
from tests.support.full_runs import examples
from tests.support.sampled_answers import (
    NUM_WORDS,
    RED_OR_BLUE,
    STORY,
    TOKENIZER,
    VOCABULARY,
    after,
    by_chance,
    ending_of,
    grammar_of,
    sampled,
)


def test_whether_an_answer_can_end_is_found_once() -> None:
    """Else each of its tokens would cost as much as following its whole grammar."""
    ending = ending_of(grammar_of(RED_OR_BLUE | {"minItems": 40}), 60)
    bits = np.full(NUM_WORDS, 2**32 - 1, np.uint32)
    assert not ending.narrow(bits, ending.first_watched) and ending.place.path == []
    with patch.object(Search, "path", side_effect=AssertionError):
        assert not ending.narrow(bits, ending.first_watched + 1)


def test_of_a_long_schema_no_more_is_tokenized_at_once_than_decides() -> None:
    """llguidance holds Python's lock for 0.1 s while it tokenizes 126 kB."""
    at_once = Mock(wraps=VOCABULARY.tokenizer.tokenize_str)
    vocabulary = JsonVocabulary(Mock(tokenize_str=at_once), NUM_WORDS)
    text = "".join(f'"{i} of these", ' for i in range(10_000))
    assert vocabulary.num_tokens(text, 512) == 512
    assert vocabulary.num_tokens(text[:100], 512) == len(VOCABULARY.tokenizer.tokenize_str(text[:100])) < 100
    assert max(len(call.args[0]) for call in at_once.call_args_list) <= 8192 and at_once.call_count == 2
    assert vocabulary.num_tokens(text[:20_000], 10**9) > 5000


def test_an_answer_that_takes_long_at_least_is_not_watched() -> None:
    ending = ending_of(grammar_of(RED_OR_BLUE | {"minItems": 5000}), 200)
    assert ending.first_watched == 200


def test_an_answer_without_a_path_is_looked_at_again_a_few_times() -> None:
    """The model may take a shorter way than the one that was found; to look at each token would take too long."""
    grammar = grammar_of(RED_OR_BLUE | {"minItems": 40})
    with patch.object(Search, "path", autospec=True, side_effect=Search.path) as found:
        _, has_ended, _ = sampled(grammar, 100, by_chance(0))
    assert not has_ended and 1 < found.call_count < 24


def test_digests_are_followed_ahead_a_few_times_only() -> None:
    """Other rows wait for the masks of a step, so each is to be made within milliseconds."""
    schema = {"type": "array", "items": {"type": "string", "pattern": "^[0-9a-f]{64}$"}}
    digits = by_chance(1, b'","', b'"', b",", *(bytes([char]) for char in b"0123456789abcdef"))
    with patch.object(Search, "path", autospec=True, side_effect=Search.path) as followed:
        tokens, has_ended, is_shortened = sampled(grammar_of(schema), 230, digits)
    assert has_ended and is_shortened and len(tokens) > 180
    assert followed.call_count < 40, "once for most of the tokens that begin or end a digest"


def test_looking_ahead_beyond_the_limits_of_a_grammar_breaks_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = grammar_of({"type": "array", "items": {"type": "string"}})
    grammars = SlotGrammars(lambda: VOCABULARY.tokenizer, TOKENIZER.n_words, 2, 4096)
    text = VOCABULARY.tokens('["some words of a text')

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
    grammar, compiled = grammar_of(schema), CompiledGrammars._compile
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
        patch("llama_core.text.grammar.limits", lambda grammar: few),
        patch.object(CompiledGrammars, "_compile", autospec=True, side_effect=compiled) as compile_again,
    ):
        shared = SlotGrammars(lambda: VOCABULARY.tokenizer, TOKENIZER.n_words, 1, 4096)
        answers = [answer(shared, seed) for seed in range(examples(4, 6))]
        assert compile_again.call_count > 1, "the limits are used up"
        shared.close()
        for seed, expected in enumerate(answers):
            own = SlotGrammars(lambda: VOCABULARY.tokenizer, TOKENIZER.n_words, 1, 4096)
            assert answer(own, seed) == expected
            own.close()


def test_an_answer_beyond_the_limits_alone_is_left_as_it_is() -> None:
    ending = ending_of(grammar_of(STORY), 40)
    tokens = VOCABULARY.tokens('{"story":"a dog')

    with (
        patch.object(Search, "path", side_effect=LimitsExceeded),
        patch.object(ending.ahead, "compiled", side_effect=ending.ahead.compiled) as compiled,
    ):
        for position, token in enumerate(tokens):
            bits = np.full(NUM_WORDS, 2**32 - 1, np.uint32)
            assert not ending.narrow(bits, position) and bits.all()
            ending.append([token], position)
    assert ending.is_broken and compiled.call_count == 2, "for a mask, and for the token behind it"
