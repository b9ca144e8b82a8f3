"""The parts of a body of OpenAI's responses as fields of a chat."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from deployments.http.responses_api.content import (
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    MessageItem,
    ReasoningItem,
    ResponseTool,
    TextFormat,
)
from deployments.openai.translation import ChatMessages

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


class ChatTools(NamedTuple):
    """The functions that the model is offered, and the place of each in the client's body. namespaces: by the name that the
    model sees, the namespace and the name of those that have one."""

    functions: list[dict[str, Any]]
    places: list[str]
    namespaces: dict[str, tuple[str, str]]


def chat_tools(tools: Sequence[ResponseTool]) -> ChatTools:
    """Functions of namespaces stand beside the others. Tools of other types are left out."""
    chat = ChatTools([], [], {})
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if tool.type == "function":
            _add_function(chat, tool, place)
        elif tool.type == "namespace":
            for inner, function in enumerate(tool.tools or ()):
                if function.type == "function":
                    _add_function(chat, function, f"{place}.tools[{inner}]", tool.name)
    return chat


def _add_function(chat: ChatTools, tool: FunctionTool, place: str, namespace: str | None = None) -> None:
    name = _in_namespace(namespace, tool.name)
    if namespace and tool.name:
        chat.namespaces[name] = namespace, tool.name
    function = {**tool.model_dump(exclude={"type", "tools"}, exclude_none=True), "name": name}
    chat.functions.append({"type": "function", "function": function})
    chat.places.append(place)


def _in_namespace(namespace: Any, name: Any) -> Any:
    """The name of a function as the model sees it: chats have no namespaces."""
    return f"{namespace}__{name}" if namespace and name else name


def _add_call(chat: ChatMessages, item: FunctionCallItem, place: str, fields: dict[str, Any]) -> None:
    if fields or not chat.messages or chat.messages[-1]["role"] != "assistant":
        chat.add(place, "assistant", "", **fields)
    function = {"name": _in_namespace(item.namespace, item.name), "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    chat.messages[-1].setdefault("tool_calls", []).append(call)


def chat_tool_choice(choice: Any) -> Any:
    """OpenAI's flat forms as those of chat completions."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": _in_namespace(choice.get("namespace"), choice.get("name"))}}
    if choice.get("type") == "allowed_tools" and isinstance(tools := choice.get("tools"), list):
        named = [chat_tool_choice(tool) for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
    return choice


def response_format(given: TextFormat | None) -> dict[str, Any] | None:
    if given is None or given.type != "json_schema":
        return None if given is None else {"type": given.type}
    return {"type": "json_schema", "json_schema": {"name": given.name or "answer", "schema": given.schema_}}
