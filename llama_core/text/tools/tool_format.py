"""The Protocol of a tool format: how a family of models writes calls. `registry.open_tool_format` finds one by its name."""

import json
from collections.abc import Sequence
from typing import Protocol

from llama_core.text.tools.lark import CallRules, MarkIds
from llama_core.text.tools.parser import AnswerParser
from llama_core.text.tools.tool import Call, Tool, ToolUse, parsed_arguments


class ToolFormat(Protocol):
    """Immutable. The prompt's parts are for models whose chat template does not write tools itself."""

    name: str  # as the argument `tool_format` has it
    marks: tuple[str, ...]  # texts that are control tokens in some vocabularies, which the parser needs to see
    own_tokens: tuple[str, ...] = ()  # a vocabulary with all of them is for this format; (): no vocabulary tells

    def recognizes_template(self, template: str) -> bool:
        """Whether a chat template writes calls in this format."""

    def parser(self, use: ToolUse) -> AnswerParser:
        """A parser of one answer, after its reasoning."""

    def rules(self, use: ToolUse, marks: MarkIds) -> CallRules:
        """The grammar of the calls. Everything that begins as the parser's calls begin must be a call of one of the tools.
        Raises InvalidParameter that names the tool whose schema cannot be compiled."""

    def instructions(self, tools: Sequence[Tool]) -> str:
        """The part of the system message that offers the tools."""

    def written_calls(self, calls: Sequence[Call]) -> str:
        """Calls of an earlier turn, as the assistant wrote them."""

    def written_result(self, name: str, content: str) -> str:
        """The content of the message that holds the result of a call of the tool `name`, which may be unknown ("")."""
        return content


def json_lines(tools: Sequence[Tool]) -> str:
    """The tools in OpenAI's form, one a line."""
    return "\n".join(json.dumps(tool.described(), ensure_ascii=False) for tool in tools)


def envelope(call: Call, key: str) -> str:
    """{"name": ..., KEY: {...}} of a call."""
    return json.dumps({"name": call.name, key: parsed_arguments(call.arguments)}, ensure_ascii=False)
