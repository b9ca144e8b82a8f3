"""Every format's parser: calls are found, text is kept, and the division of a stream does not matter."""

import json
import random

import pytest

from llama_core.text.tools.pieces import Arguments, CallStart, Content, Piece, joined
from llama_core.text.tools.tool_format import find_tool_format
from tests.support.tool_calls import FORMATS, USE, parts, random_answer, read_calls

TAG = "<|python_tag|>"


def parsed(tool_format: str, pieces: list[str]) -> list[Piece]:
    parser = find_tool_format(tool_format).parser(USE)
    found = [piece for part in pieces for piece in parser.push(part)]
    return joined([*found, *parser.finish()])


@pytest.mark.parametrize("tool_format", FORMATS)
def test_two_hundred_answers_are_read_whole_and_in_any_division(tool_format: str) -> None:
    rng = random.Random(tool_format)
    for _ in range(200):
        text, content, calls = random_answer(rng, tool_format)
        whole = parsed(tool_format, [text])
        assert read_calls(whole) == (content, [(call.name, json.loads(call.arguments)) for call in calls])
        assert parsed(tool_format, list(text)) == whole
        for _ in range(5):
            assert parsed(tool_format, parts(rng, text)) == whole


@pytest.mark.parametrize("tool_format", FORMATS)
def test_damaged_answers_lose_no_text_and_do_not_depend_on_the_division(tool_format: str) -> None:
    rng = random.Random(f"damage {tool_format}")
    for _ in range(300):
        text, _, _ = random_answer(rng, tool_format)
        at = rng.randrange(len(text) + 1)
        damaged = rng.choice([text[:at], text[:at] + rng.choice('{}[]"<x,') + text[at:], text[at:]])
        whole = parsed(tool_format, [damaged])
        assert parsed(tool_format, list(damaged)) == whole
        assert parsed(tool_format, parts(rng, damaged)) == whole
        if not any(isinstance(piece, CallStart) for piece in whole):
            assert "".join(piece.text for piece in whole if isinstance(piece, Content)) == damaged


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", 'Use <tool_call> {"name": "unknown", "arguments": {}} </tool_call> so.'),
        ("hermes", "a <tool_call> b"),
        ("hermes", '<tool_call>{"arguments": {}, "name": "get-time"}</tool_call>'),
        ("llama3_json", '{"type": "object", "x": 1}'),
        ("llama3_json", 'Say {"name": "get-time", "parameters": {}}'),
        ("pythonic", "[1, 2, get_weather(x)]"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral_args", "[TOOL_CALLS]unknown[ARGS]{}"),
        ("llama2", "<tool_call"),
        ("granite", "<|tool_call|> nothing"),
        ("phi4_mini_json", "import functools\n[1]"),
        ("harmony", "<|channel|>commentary to=functions.unknown<|message|>{}"),
        ("harmony", "<|channel|>commentary to=functions.get_weather<|message|>text"),
    ],
)
def test_what_only_looks_like_a_call_stays_text(tool_format: str, text: str) -> None:
    assert parsed(tool_format, [text]) == [Content(text)]


def test_arguments_arrive_before_the_call_is_complete() -> None:
    parser = find_tool_format("hermes").parser(USE)
    assert parser.push('<tool_call>\n{"name": "get_weather", "arg') == []
    assert parser.push('uments": {"ci') == [CallStart("get_weather"), Arguments('{"ci')]
    assert parser.push('ty": "P') == [Arguments('ty": "P')]


def test_other_forms_of_the_same_call_are_read() -> None:
    call = ("get_weather", {"city": "Rome", "metric": True})
    for tool_format, text in (
        ("hermes", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Rome", "metric": true}}]</tool_call>'),
        ("llama3_json", TAG + '{"type": "function", "name": "get_weather", "arguments": {"city": "Rome", "metric": true}}'),
        ("llama3_json", '\n{"name":"get_weather","arguments":{"city":"Rome","metric":true}}'),
        ("pythonic", "[get_weather(city='Rome', metric=True)]"),
        ("granite", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Rome", "metric": true}}]'),
        ("phi4_mini_json", 'functools[{"name": "get_weather", "arguments": {"city": "Rome", "metric": true}}]'),
        ("harmony", '<|channel|>commentary to=functions.get_weather json<|message|>{"city": "Rome", "metric": true}'),
        ("harmony", '<|channel|>commentary to=functions.get_weather<|message|> {"city": "Rome", "metric": true}<|call|>'),
        ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "metric": true}'),
    ):  # fmt: skip
        assert read_calls(parsed(tool_format, [text])) == ("", [call])
