"""Tools, calls and answers in every tool format, and random divisions of a text."""

import json
import random
from typing import Any, Final

from llama_core.text.tools.pieces import Arguments, CallStart, Content, Piece
from llama_core.text.tools.tool import Call, Tool, ToolUse
from llama_core.text.tools.tool_format import TOOL_FORMATS, find_tool_format

WEATHER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "metric": {"type": "boolean"},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["wind", "rain"]}},
}
NUMBER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"a-b": {"type": "number"}, "note": {"type": ["string", "null"]}},
    "required": ["a-b"],
    "additionalProperties": False,
}
TOOLS: Final = (
    Tool("get_weather", "The weather of a city.", json.dumps(WEATHER), strict=True),
    Tool("get-time", "The time.", json.dumps({"type": "object", "properties": {}, "additionalProperties": False})),
    Tool("set_number", None, json.dumps(NUMBER)),
)
USE: Final = ToolUse(TOOLS)
FORMATS: Final = tuple(TOOL_FORMATS)
_TEXTS: Final = (
    *("Paris", "São Paulo", 'a "quoted" {x}', "back\\slash", "</tool_call>", "[TOOL_CALLS]", "🦙 ]})", "<think>"),
)


def random_calls(rng: random.Random, num_calls: int) -> list[Call]:
    """Calls whose arguments follow their schemas, with texts that look like parts of the formats."""
    return [_random_call(rng) for _ in range(num_calls)]


def _random_call(rng: random.Random) -> Call:
    kind = rng.randrange(3)
    if kind == 1:
        return Call("get-time", "{}")
    if kind == 2:
        number: dict[str, Any] = {"a-b": rng.choice([3, -0.5, 100])}
        if rng.random() < 0.5:
            number["note"] = rng.choice([None, *_TEXTS])
        return Call("set_number", json.dumps(number, ensure_ascii=False))
    weather: dict[str, Any] = {"city": rng.choice(_TEXTS)}
    for name, values in (("days", [1, 9]), ("metric", [True, False]), ("tags", [[], ["wind"], ["rain", "wind"]])):
        if rng.random() < 0.5:
            weather[name] = rng.choice(values)
    return Call("get_weather", json.dumps(weather, ensure_ascii=False))


def random_answer(rng: random.Random, tool_format: str) -> tuple[str, str, list[Call]]:
    """An answer: its text as the model writes it, the content that it has, and its calls."""
    calls = random_calls(rng, rng.randrange(4))
    content = rng.choice(["", "Let me see. ", "The answer is {x: 1} [y] <tool_x>, no?"])
    if tool_format in ("llama3_json", "pythonic") and calls:
        content = ""
    written = find_tool_format(tool_format).written_calls(calls) if calls else ""
    text = "".join((content, "\n" if content and calls else "", written))  # a str without marks
    return text, content.rstrip() if calls else content, calls


def parts(rng: random.Random, text: str) -> list[str]:
    """The text, divided at random."""
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(0, 12)))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read_calls(pieces: list[Piece]) -> tuple[str, list[tuple[str, Any]]]:
    """The content and the calls of joined pieces; the arguments of each are parsed."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            calls.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]
