"""How a chat template takes tool calls, found by rendering a small conversation in each way that published templates know."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from llama_core.errors import InvalidDialog
from llama_core.text.tools.tool import parsed_arguments

SHORT_ID_CHARS: Final = 9  # of the ids that Mistral's templates take
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "d",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "d"}}},
    },
}
_CALL: Final = {
    "id": "call_probe0123456789",
    "type": "function",
    "function": {"name": "probe_tool", "arguments": '{"probe_key": "probe_value"}'},
}
_DIALOG: Final[Sequence[Mapping[str, Any]]] = (
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "probe_result", "name": "probe_tool", "tool_call_id": _CALL["id"]},
)
Render = Callable[[Sequence[Mapping[str, Any]], list[dict[str, Any]]], str]
_WRITTEN: Final = ("probe_tool", "probe_value", "probe_result")


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """arguments_are_text: not an object. content_is_null: of a call without text. has_short_ids: 9 characters.

    needs_object: the template iterates over the arguments. A model's text that is no object becomes {"arguments": text}.
    """

    arguments_are_text: bool
    content_is_null: bool
    has_short_ids: bool
    needs_object: bool = False

    def styled(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message in OpenAI's form, with arguments as JSON text, as the template takes it."""
        styled = dict(message)
        if "tool_call_id" in styled:
            styled["tool_call_id"] = self._id(styled["tool_call_id"])
        if not message.get("tool_calls"):
            styled.pop("tool_calls", None)  # many templates ask only whether it is there
            return styled
        styled["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        if self.content_is_null and not message["content"]:
            styled["content"] = None
        return styled

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if not self.arguments_are_text:
            arguments = parsed_arguments(function["arguments"])
            is_wrapped = self.needs_object and isinstance(arguments, str)
            function["arguments"] = {"arguments": arguments} if is_wrapped else arguments
        return {**call, "id": self._id(call["id"]), "function": function}

    def _id(self, call_id: str) -> str:
        if not self.has_short_ids or (len(call_id) == SHORT_ID_CHARS and call_id.isalnum()):
            return call_id
        return base64.b32encode(hashlib.sha256(call_id.encode()).digest()).decode()[:SHORT_ID_CHARS].lower()


def find_tool_style(render: Render) -> ToolStyle | None:
    """The first style in which `render`, given messages and tools, writes a call and its result; None if it does in none."""
    for has_short_ids, arguments_are_text, content_is_null in product((False, True), repeat=3):
        style = ToolStyle(arguments_are_text, content_is_null, has_short_ids)
        try:
            written = render([style.styled(message) for message in _DIALOG], [_TOOL])
        except InvalidDialog:
            continue
        # The tool's name twice: where the tool is offered, and in the call.
        if all(text in written for text in _WRITTEN) and written.count("probe_tool") > 1 and "probe_key" in written:
            return style if _writes_text_arguments(render, style) else replace(style, needs_object=True)
    return None


def writes_offer(render: Render) -> bool:
    """Whether `render` writes the tools that a request offers."""
    try:
        return "probe_key" in render(_DIALOG[:1], [_TOOL])
    except InvalidDialog:
        return False


def _writes_text_arguments(render: Render, style: ToolStyle) -> bool:
    call = {**_CALL, "function": {"name": "probe_tool", "arguments": "probe_text"}}
    dialog = (_DIALOG[0], {**_DIALOG[1], "tool_calls": [call]}, _DIALOG[2])
    try:
        return "probe_text" in render([style.styled(message) for message in dialog], [_TOOL])
    except InvalidDialog:
        return False
