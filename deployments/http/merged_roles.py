"""Encodes chats whose roles do not alternate, which many clients send: two system messages, or two of one user.

A chat format gets the messages as they are. If it refuses them, it gets them with neighbours of one role merged. What it
refuses then is a 400 in its words. The reference's strict rule holds for calls by handle and in process.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from llama_core.errors import InvalidDialog, SpecialTags
from llama_core.text.chat_format import Message

SEPARATOR = "\n\n"  # between the contents of merged messages
_MERGEABLE = {"role", "content", "name"}


def encode_merging(dialog: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]]) -> list[int]:
    """Ids of `dialog` by `encode`. Raises its errors, with indices of `dialog`."""
    try:
        return encode(dialog)
    except SpecialTags:
        raise
    except InvalidDialog:
        merged, origins = merge_neighbours(dialog)
        if merged == list(dialog):
            raise
    try:
        return encode(merged)
    except InvalidDialog as error:
        raise _at_origin(error, origins) from None


def merge_neighbours(dialog: Sequence[Message]) -> tuple[list[Message], list[int]]:
    """The messages with neighbours of one role and name merged, and the index of each one's first message in `dialog`.

    "developer" counts as "system". Messages with tool calls, or that answer one, stay apart.
    """
    merged: list[dict[str, Any]] = []
    origins: list[int] = []
    for index, message in enumerate(dialog):
        fields: dict[str, Any] = dict(message)
        if fields["role"] == "developer":
            fields["role"] = "system"
        last = merged[-1] if merged else None
        if last is not None and _can_merge(last) and _can_merge(fields) and _who(last) == _who(fields):
            last["content"] = SEPARATOR.join(text for text in (last["content"], fields["content"]) if text)
        else:
            merged.append(fields)
            origins.append(index)
    return cast(list[Message], merged), origins


def _can_merge(message: dict[str, Any]) -> bool:
    return message.keys() <= _MERGEABLE and message["role"] != "tool" and isinstance(message["content"], str)


def _who(message: dict[str, Any]) -> tuple[object, object]:
    return message["role"], message.get("name")


def _at_origin(error: InvalidDialog, origins: Sequence[int]) -> InvalidDialog:
    """The error about merged messages, with the index of the message as it was sent."""
    if error.index is None:
        return error
    sent = origins[error.index]
    message = error.message.replace(f"messages[{error.index}]", f"messages[{sent}]", 1)
    return type(error)(message, index=sent, param=f"messages[{sent}]")
