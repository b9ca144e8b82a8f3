"""Encodes chats in a form that the chat format takes: clients send two system messages, or several calls in one message.

A chat format gets the messages as they are. If it refuses them, it gets them with neighbours of one role merged, then with one
call a message, as Llama 3.1's template wants. What it refuses then is a 400 in its words. The reference's strict rule holds for
its own methods by handle and in process.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from llama_core.errors import InvalidDialog, SpecialTags
from llama_core.text.chat_format import Message

SEPARATOR = "\n\n"  # between the contents of merged messages
_MERGEABLE = {"role", "content", "name"}


def encode_merging(
    dialog: Sequence[Message],
    encode: Callable[[Sequence[Message]], list[int]],
    sent: Sequence[int | None] | None = None,
) -> list[int]:
    """Ids of `dialog` by `encode`. Raises its errors, with indices of `dialog`, or of the messages as they were sent.

    sent: the index of each message of `dialog` as it was sent; None for one that has the tools alone.
    """
    try:
        return _encoded(dialog, encode)
    except InvalidDialog as error:
        raise error if sent is None else _at_origin(error, sent) from None


def _encoded(dialog: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]]) -> list[int]:
    try:
        return encode(dialog)
    except SpecialTags:
        raise
    except InvalidDialog as error:
        refused, tried = error, list(dialog)
    merged, origins = merge_neighbours(dialog)
    for messages, places in ((merged, origins), split_calls(merged, origins)):
        if messages == tried:
            continue
        try:
            return encode(messages)
        except InvalidDialog as error:
            refused, tried = _at_origin(error, places), messages
    raise refused from None


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


def split_calls(dialog: Sequence[Message], origins: Sequence[int]) -> tuple[list[Message], list[int]]:
    """The messages with one call each, followed by its result, and their `origins`. Results of other calls stay after them."""
    split: list[Any] = []
    places: list[int] = []
    moved: set[int] = set()  # results after their calls
    for at, message in enumerate(dialog):
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            if at not in moved:
                split.append(message)
                places.append(origins[at])
            continue
        results = _results_behind(dialog, at)
        for number, call in enumerate(calls):
            later = {"content": "", "reasoning_content": ""} if number else {}
            split.append({**message, **later, "tool_calls": [call]})
            places.append(origins[at])
            if (index := results.pop(call["id"], None)) is not None:
                moved.add(index)
                split.append(dialog[index])
                places.append(origins[index])
    return split, places


def _results_behind(dialog: Sequence[Message], at: int) -> dict[str, int]:
    """The indices of the results that follow the message at `at`, by their call's id."""
    found: dict[str, int] = {}
    for index in range(at + 1, len(dialog)):
        if dialog[index]["role"] != "tool":
            break
        found.setdefault(dialog[index].get("tool_call_id", ""), index)
    return found


def _can_merge(message: dict[str, Any]) -> bool:
    return message.keys() <= _MERGEABLE and message["role"] != "tool" and isinstance(message["content"], str)


def _who(message: dict[str, Any]) -> tuple[object, object]:
    return message["role"], message.get("name")


def _at_origin(error: InvalidDialog, origins: Sequence[int | None]) -> InvalidDialog:
    """The error about changed messages, with the index of the message as it was sent."""
    if error.index is None:
        return error
    sent = origins[error.index]
    place = "tools" if sent is None else f"messages[{sent}]"
    message = error.message.replace(f"messages[{error.index}]", place, 1)
    return type(error)(message, index=sent, param=place)
