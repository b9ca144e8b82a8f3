"""Finds the tool format with a name, or the one of a model. Each format is one line in a table here."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Final

from llama_core.errors import ConfigError
from llama_core.text.tools.tool_format import ToolFormat

# Name -> class, imported on first use. A model has the first format that recognizes its template, else its vocabulary.
TOOL_FORMATS: Final[Mapping[str, str]] = {
    "mistral_args": "llama_core.text.tools.mistral:MistralArgsFormat",
    "mistral": "llama_core.text.tools.mistral:MistralFormat",
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
