"""Writes tools, calls and results into plain messages, for a chat format that does not know them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from llama_core.text.chat_format import Dialog, Message
from llama_core.text.template.marked_text import concat
from llama_core.text.tools.tool import Call, Tool
from llama_core.text.tools.tool_format import ToolFormat


def has_tools(dialog: Dialog) -> bool:
    """Whether a message calls tools or has a tool's result."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in dialog)


def plain_dialog(
    dialog: Dialog, tools: Sequence[Tool], tool_format: ToolFormat, result_role: str
) -> tuple[list[Message], list[int | None]]:
    """`dialog` in messages with text only, and for each the index in `dialog` of the message that it comes from, the first of
    several; None for a system message of the tools alone.

    result_role: of the messages with results; neighbours of one role are joined where one of them has a result, because most
    formats want roles in turn.
    """
    names = {call["id"]: call["function"]["name"] for message in dialog for call in message.get("tool_calls") or ()}
    plain: list[dict[str, Any]] = []
    origins: list[int | None] = []
    after_result = False
    for index, message in enumerate(dialog):
        role: str = message["role"]
        content = message["content"]
        is_result = role == "tool"
        if is_result:
            name = names.get(message.get("tool_call_id", ""), message.get("name", ""))
            role, content = result_role, tool_format.written_result(name, content)
        elif calls := message.get("tool_calls"):
            written = tool_format.written_calls([_call(call) for call in calls])
            content = concat((content, "\n", written)) if content else written
        if plain and plain[-1]["role"] == role and (is_result or after_result):
            plain[-1]["content"] += f"\n{content}"
        else:
            kept = {"name": message["name"]} if "name" in message and not is_result else {}
            plain.append({"role": role, "content": content, **kept})
            origins.append(index)
        after_result = is_result
    if tools:
        instructions = tool_format.instructions(tools)
        if plain[0]["role"] in ("system", "developer"):
            plain[0]["content"] += f"\n\n{instructions}"
        else:
            plain.insert(0, {"role": "system", "content": instructions})
            origins.insert(0, None)
    return cast(list[Message], plain), origins


def _call(call: Mapping[str, Any]) -> Call:
    function = call["function"]
    arguments = function["arguments"]
    return Call(
        function["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )
