"""The parts of a body of Anthropic's messages as fields of a chat."""

from collections.abc import Sequence
from typing import Any, Final

from deployments.http.messages_api.content import (
    InputMessage,
    InputTool,
    OutputConfig,
    OutputFormat,
    TextBlock,
    ToolChoice,
    ToolResultBlock,
)
from deployments.openai.translation import ChatMessages

NAMES: Final = {
    "parameters": "input_schema",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "continue_final_message": "messages (the last one is the assistant's, and the answer would continue it)",
}
CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def chat_messages(system: Sequence[TextBlock], messages: Sequence[InputMessage]) -> ChatMessages:
    chat = ChatMessages([], [])
    if system:
        chat.add("system", "system", _joined(system))
    for index, message in enumerate(messages):
        _add_message(chat, message, f"messages[{index}]")
    return chat


def ending_fields(messages: ChatMessages) -> dict[str, Any]:
    """The answer continues a last message of the assistant."""
    last = messages.messages[-1]
    continues = last["role"] == "assistant" and last["content"] and "tool_calls" not in last
    return {"continue_final_message": True} if continues else {}


def tool_fields(tools: Sequence[InputTool], choice: ToolChoice | None) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if offered := [_function(tool) for tool in tools if tool.is_offered]:
        fields["tools"] = offered
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = named if choice.type == "tool" else CHOICES[choice.type]
        if choice.disable_parallel_tool_use:
            fields["parallel_tool_calls"] = False
    return fields


def _function(tool: InputTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def output_fields(config: OutputConfig | None, older: OutputFormat | None) -> dict[str, Any]:
    """older: the format under its older name."""
    fields: dict[str, Any] = {}
    asked = older if config is None or config.format is None else config.format
    if asked is not None:
        schema = {"name": "answer", "schema": asked.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config is not None and config.effort is not None:
        fields["reasoning_effort"] = config.effort
    return fields


def _add_message(messages: ChatMessages, message: InputMessage, place: str) -> None:
    """One message as one of a chat; its results of tools are messages of their own, in their order."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    num_results = 0
    for index, block in enumerate(message.content):
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "tool_result":
            num_results += 1
            if texts:
                messages.add(place, message.role, "\n".join(texts))
                texts.clear()
            messages.add(f"{place}.content[{index}]", "tool", _result(block), tool_call_id=block.tool_use_id)
        elif block.type == "thinking":
            thoughts.append(block.thinking)
    fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
    if thoughts and message.role == "assistant":
        fields["reasoning_content"] = "\n".join(thoughts)
    if texts or fields or not num_results:
        messages.add(place, message.role, "\n".join(texts), **fields)


def _result(block: ToolResultBlock) -> str:
    """Chats have no field for a result that is an error."""
    return ("Error: " if block.is_error else "") + _joined(block.content)


def _joined(blocks: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)
