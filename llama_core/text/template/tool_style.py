"""How a chat template takes tool calls, found by rendering a small conversation in each way that published templates know."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from llama_core.errors import InvalidDialog
from llama_core.text.tools.tool import Tool, described, parsed_arguments

SHORT_ID_CHARS: Final = 9  # of the ids that Mistral's templates take
_FUNCTION: Final = {
    "name": "probe_tool",
    "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "d"}}},
}
_UNDESCRIBED: Final = {"type": "function", "function": _FUNCTION}
_TOOL: Final = {"type": "function", "function": {"description": "d", **_FUNCTION}}
_CALL: Final = {
    "id": "call_probe0123456789",
    "type": "function",
    "function": {"name": "probe_tool", "arguments": '{"probe_key": "probe_value"}'},
}
_TEXT_CALL: Final = {**_CALL, "function": {"name": "probe_tool", "arguments": "probe_text"}}
_MORE: Final = {**_CALL, "function": {"name": "probe_tool", "arguments": '{"probe_key": "probe_more"}'}}
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
    needs_description: of each tool. has_one_text: a message with calls has content or reasoning, not both. has_one_call: the
    template leaves out the further calls of a message.
    """

    arguments_are_text: bool
    content_is_null: bool
    has_short_ids: bool
    needs_object: bool = False
    needs_description: bool = False
    has_one_text: bool = False
    has_one_call: bool = False

    def styled(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message in OpenAI's form, with arguments as JSON text, as the template takes it. Raises InvalidDialog where that
        would leave out a call."""
        styled = dict(message)
        if "tool_call_id" in styled:
            styled["tool_call_id"] = self._id(styled["tool_call_id"])
        if not message.get("tool_calls"):
            styled.pop("tool_calls", None)  # many templates ask only whether it is there
            return styled
        if self.has_one_call and len(message["tool_calls"]) > 1:
            raise InvalidDialog("the model's chat template writes one call of each message")
        styled["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        if self.has_one_text and message["content"] and (thoughts := styled.pop("reasoning_content", "")):
            styled["content"] = f"{thoughts}\n{message['content']}"
        if self.content_is_null and not message["content"]:
            styled["content"] = None
        return styled

    def offered(self, tools: Sequence[Tool]) -> list[dict[str, Any]]:
        if self.needs_description:
            tools = [replace(tool, description=tool.description or "") for tool in tools]
        return described(tools)

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
            return replace(
                style,
                needs_object="probe_text" not in _rendered(render, style, [_TOOL], tool_calls=[_TEXT_CALL]),
                needs_description=not _rendered(render, style, [_UNDESCRIBED]),
                has_one_text=not _rendered(render, style, [_TOOL], content="d", reasoning_content="d"),
                has_one_call="probe_more"
                not in (_rendered(render, style, [_TOOL], tool_calls=[_CALL, _MORE]) or "probe_more"),
            )
    return None


def writes_offer(render: Render) -> bool:
    """Whether `render` writes the tools that a request offers."""
    try:
        return "probe_key" in render(_DIALOG[:1], [_TOOL])
    except InvalidDialog:
        return False


def _rendered(render: Render, style: ToolStyle, tools: list[dict[str, Any]], **fields: Any) -> str:
    """The conversation with other fields of the message with the call; "" where the template refuses it."""
    dialog = (_DIALOG[0], {**_DIALOG[1], **fields}, _DIALOG[2])
    try:
        return render([style.styled(message) for message in dialog], tools)
    except InvalidDialog:
        return ""
