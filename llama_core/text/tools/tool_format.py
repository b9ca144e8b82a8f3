"""The Protocol of a tool format: how a family of models writes calls. `open_tool_format` finds one by its name.

Each format is one line in a table here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Final, Protocol

from llama_core.errors import ConfigError
from llama_core.text.tools.lark import CallRules, MarkIds
from llama_core.text.tools.parser import AnswerParser
from llama_core.text.tools.tool import Call, Tool, ToolUse, parsed_arguments


class ToolFormat(Protocol):
    """Immutable. The prompt's parts are for models whose chat template does not write tools itself."""

    name: str  # as the argument `tool_format` has it
    marks: tuple[str, ...]  # texts that are control tokens in some vocabularies, which the parser needs to see
    own_tokens: tuple[str, ...] = ()  # a vocabulary with all of them is for this format; (): no vocabulary tells
    result_role: str = ""  # of a message with a result, where the template offers tools but writes no calls

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


# Name -> class, imported on first use. A model has the first format that recognizes its template, else its vocabulary.
TOOL_FORMATS: Final[Mapping[str, str]] = {
    "mistral_args": "llama_core.text.tools.mistral:MistralArgsFormat",
    "mistral": "llama_core.text.tools.mistral:MistralFormat",
    "harmony": "llama_core.text.tools.harmony:HarmonyFormat",
    "phi4_mini_json": "llama_core.text.tools.granite:Phi4MiniFormat",
    "granite": "llama_core.text.tools.granite:GraniteFormat",
    "hermes": "llama_core.text.tools.hermes:HermesFormat",
    "pythonic": "llama_core.text.tools.pythonic:PythonicFormat",
    "llama3_json": "llama_core.text.tools.llama3_json:Llama3JsonFormat",
    "llama2": "llama_core.text.tools.llama2:Llama2ToolFormat",
}
AUTO: Final = "auto"
TOOL_FORMAT_NAMES: Final = (AUTO, *TOOL_FORMATS)
_OTHERWISE: Final = "hermes"  # for a model that says nothing of tools: the most common form


def find_tool_format(name: str) -> ToolFormat:
    """The format called `name`. Raises ConfigError."""
    if name not in TOOL_FORMATS:
        raise ConfigError(f"tool_format must be one of {', '.join(TOOL_FORMAT_NAMES)}", param="tool_format")
    found: ToolFormat = resolve_name(TOOL_FORMATS[name])()
    return found


def open_tool_format(
    name: str, *, template: str | None, chat_format: str, has_token: Callable[[str], bool]
) -> ToolFormat:
    """The format that the argument `tool_format` says; "auto" is the model's. template: its chat template's source.
    chat_format: the name of its chat format. has_token: whether the vocabulary has a token of this text."""
    if name != AUTO:
        return find_tool_format(name)
    formats = [find_tool_format(each) for each in TOOL_FORMATS]
    for each in formats:
        if template is not None and each.recognizes_template(template):
            return each
    if chat_format == "llama2":
        return find_tool_format("llama2")
    for each in formats:
        if each.own_tokens and all(map(has_token, each.own_tokens)):
            return each
    return find_tool_format(_OTHERWISE)
