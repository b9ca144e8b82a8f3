"""The parts of a body of OpenAI's responses as fields of a chat."""

from collections.abc import Sequence
from typing import Any, Final

from deployments.http.responses_api.content import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    MessageItem,
    ReasoningItem,
    TextFormat,
)
from deployments.http.translation import ChatMessages

NAMES: Final = {"response_format": "text.format", "max_tokens": "max_output_tokens", "messages": "input"}
Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


def chat_messages(instructions: str | None, items: Sequence[Item]) -> ChatMessages:
    """Neighbouring reasoning, text and calls of the assistant are one message."""
    chat = ChatMessages([], [])
    if instructions:
        chat.add("instructions", "system", instructions)
    thoughts: list[str] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if isinstance(item, ReasoningItem):
            if item.content:
                thoughts.append(item.content)
            continue
        fields = {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        if isinstance(item, FunctionCallItem):
            _add_call(chat, item, place, fields)
        elif isinstance(item, FunctionCallOutputItem):
            chat.add(place, "tool", item.output, tool_call_id=item.call_id)
        else:
            chat.add(place, item.role, item.content, **(fields if item.role == "assistant" else {}))
        thoughts.clear()
    return chat


def _add_call(chat: ChatMessages, item: FunctionCallItem, place: str, fields: dict[str, Any]) -> None:
    if fields or not chat.messages or chat.messages[-1]["role"] != "assistant":
        chat.add(place, "assistant", "", **fields)
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    chat.messages[-1].setdefault("tool_calls", []).append(call)


def chat_tools(tools: Sequence[FunctionTool]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)} for tool in tools]


def chat_tool_choice(choice: Any) -> Any:
    """OpenAI's flat forms as those of chat completions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
        named = [chat_tool_choice(tool) for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return choice


def response_format(given: TextFormat | None) -> dict[str, Any] | None:
    if given is None or given.type != "json_schema":
        return None if given is None else {"type": given.type}
    return {"type": "json_schema", "json_schema": {"name": given.name or "answer", "schema": given.schema_}}
