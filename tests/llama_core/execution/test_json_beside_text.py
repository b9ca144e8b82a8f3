"""JSON behind reasoning, and calls of tools behind free text, come to their end before the limit."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from llama_core.text.answer_format import MAX_GRAMMAR_BYTES, AnswerFormat
from llama_core.text.reasoning import ReasoningMarks
from llama_core.text.tools.pieces import Arguments, CallStart, Content
from llama_core.text.tools.registry import find_tool_format
from llama_core.text.tools.tool import Call, Tool, ToolUse
from tests.programs.structured_output import unbounded
from tests.support.sampled_answers import (
    NUM_WORDS,
    SEEDS,
    STORY,
    TOKENIZER,
    VOCABULARY,
    after,
    by_chance,
    ending_of,
    grammar_of,
    pieces_of,
    sampled,
)
from tests.support.tool_calls import FORMATS, NUMBER, TOOLS

LONG_STORY = 'Once upon a time 😀 there was a \\"dog\\". ' * 30


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_of_tools_end_and_their_arguments_follow_the_schemas(tool_format: str) -> None:
    answers = AnswerFormat(TOKENIZER, find_tool_format(tool_format), None)
    schemas = {tool.name: json.loads(tool.schema) for tool in TOOLS}
    use = ToolUse(TOOLS, "required")
    num_shortened = 0
    for seed in range(SEEDS):
        tokens, has_ended, is_shortened = sampled(answers.grammar(use, begun=False), 120, by_chance(seed))
        assert has_ended, TOKENIZER.decode(tokens)
        pieces = pieces_of(answers, use, tokens)
        assert {type(piece) for piece in pieces} == {CallStart, Arguments}, pieces
        for start, arguments in zip(pieces[::2], pieces[1::2], strict=True):
            assert isinstance(start, CallStart) and isinstance(arguments, Arguments)
            jsonschema.validate(json.loads(arguments.text), schemas[start.name])
        num_shortened += is_shortened
    assert num_shortened > SEEDS // 6


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_behind_free_text_end_and_their_arguments_follow_the_schema(tool_format: str) -> None:
    answers, use = AnswerFormat(TOKENIZER, find_tool_format(tool_format), None), ToolUse(TOOLS)
    # Formats whose calls are all of an answer take no text before them.
    before = 'I say "look, and ' if tool_format in ("hermes", "mistral", "mistral_args") else ""
    call = answers.tool_format.written_calls([Call("set_number", '{"a-b": 1}')])
    num_shortened = 0
    for seed in range(SEEDS):
        text = before + call[: call.index("1")]
        num_begun = len(VOCABULARY.tokens(text))
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
    matcher = VOCABULARY.matcher(grammar)
    ending, bits = ending_of(grammar, 60), np.zeros(NUM_WORDS, np.uint32)
    for position in range(60):
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        expected = bits.copy()
        assert not ending.narrow(bits, position) and np.array_equal(bits, expected)
        (token,) = VOCABULARY.tokens('"') if position % 7 == 3 else [random.Random(position).randrange(300, 600)]
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
        limit = len(VOCABULARY.tokens(thought)) + 120
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
    limit = len(VOCABULARY.tokens(text)) + num_left
    assert ending_of(grammar, limit).first_watched > len(VOCABULARY.tokens(begins)) + 8
    tokens, has_ended, is_shortened = sampled(grammar, limit, after(text, letters))
    assert has_ended and is_shortened, TOKENIZER.decode(tokens)
    answer = TOKENIZER.decode(tokens)[len(begins) :].removesuffix("</tool_call>").removesuffix("}" if mode else "")
    jsonschema.validate(json.loads(answer), STORY)


@pytest.mark.parametrize("num_left", [20, 40, 300])
def test_the_mark_that_opens_reasoning_is_allowed(num_left: int) -> None:
    answers = AnswerFormat(TOKENIZER, find_tool_format("hermes"), ReasoningMarks())
    text = '<think>ok</think>{"a-b": 1}'
    grammar = answers.after_reasoning(grammar_of(NUMBER), begun=False)
    limit = len(VOCABULARY.tokens(text)) + num_left
    tokens, has_ended, is_shortened = sampled(grammar, limit, after(text, min))
    assert has_ended and not is_shortened and TOKENIZER.decode(tokens) == text


@pytest.mark.parametrize("num_left", range(6))
def test_a_character_of_several_tokens_in_free_text_keeps_its_masks(num_left: int) -> None:
    answers, use = AnswerFormat(TOKENIZER, find_tool_format("hermes"), None), ToolUse(TOOLS)
    text = "All is well, my friend 😀"
    limit = len(VOCABULARY.tokens(text)) + num_left
    for num_watched in range(1, 9):
        tokens, _, is_shortened = sampled(
            answers.grammar(use, begun=False), limit, after(text, min), num_watched=num_watched
        )
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
        matcher = VOCABULARY.matcher(grammar)
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
