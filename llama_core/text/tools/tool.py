"""The tools that a request offers, and what the model may do with them. Knows nothing of HTTP or of any format."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

ToolMode = Literal["auto", "required"]
MAX_ARGUMENT_DEPTH: Final = 100  # of an earlier call's arguments, as a chat template gets them
MAX_CALLS: Final = 16  # of one answer; the grammar ends there


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. schema: JSON text of the schema of its arguments, an object's.

    place: of the schema in the request, for errors; "" for its place in OpenAI's list of tools.
    """

    name: str
    description: str | None = None
    schema: str = '{"type": "object", "properties": {}}'
    strict: bool = False
    place: str = field(default="", compare=False)

    def described(self) -> dict[str, Any]:
        """The tool in OpenAI's form, which chat templates read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": json.loads(self.schema)}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the answer may call. mode: "required" for calls and nothing else. parallel: more than one call."""

    tools: tuple[Tool, ...]
    mode: ToolMode = "auto"
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def max_calls(self) -> int:
        return MAX_CALLS if self.parallel else 1


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an earlier turn. arguments: JSON text of an object, or another text."""

    name: str
    arguments: str


def parsed_arguments(text: str) -> dict[str, Any] | str:
    """The object that the text has as JSON; other text, and one that is nested deep, as it is."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) and not _is_deep(parsed, MAX_ARGUMENT_DEPTH) else text


def _is_deep(value: object, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deep(each, levels - 1) for each in inner)


def described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools in OpenAI's form."""
    return [tool.described() for tool in tools]
