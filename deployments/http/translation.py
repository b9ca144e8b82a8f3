"""Bodies of other APIs as the body of a chat: errors of the chat name the fields that the client sent."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deployments.http.request_body import KIND_MARK, validate
from deployments.http.schemas import ChatBody
from llama_core.errors import InvalidDialog, InvalidRequest

_PLACE = re.compile(r"messages\[(\d+)\](\.[\w.\[\]]*)?")


def kind_of(item: object) -> str:
    """The kind of a union of objects that differ by their type."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", "")
    return f"{KIND_MARK}{kind}"


@dataclass(frozen=True, slots=True)
class ChatMessages:
    """The messages of a chat, and for each the place of the client's body that it comes from."""

    messages: list[dict[str, Any]]
    places: list[str]

    def add(self, place: str, role: str, content: str, **fields: Any) -> None:
        self.messages.append({"role": role, "content": content, **fields})
        self.places.append(place)


@dataclass(frozen=True, slots=True)
class TranslatedChat:
    """A chat's body. names: for fields of a chat, those that the client sent."""

    body: ChatBody
    places: Sequence[str]
    names: Mapping[str, str]

    @contextmanager
    def in_the_clients_words(self) -> Iterator[None]:
        """Errors of the block name the client's fields."""
        with _in_the_clients_words(self.places, self.names):
            yield


def translated(fields: Mapping[str, Any], messages: ChatMessages, names: Mapping[str, str]) -> TranslatedChat:
    """`fields` and `messages` as a chat. Raises InvalidRequest that names the client's field."""
    with _in_the_clients_words(messages.places, names):
        body = validate(ChatBody, {**fields, "messages": messages.messages})
    return TranslatedChat(body, messages.places, names)


@contextmanager
def _in_the_clients_words(places: Sequence[str], names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        ours = error.param or ""
        theirs = _theirs(ours, places, names)
        message = error.message
        if ours and message.startswith(ours):
            message = theirs + message.removeprefix(ours)
        elif (found := _PLACE.match(message)) is not None:
            message = _theirs(found[0], places, names) + message.removeprefix(found[0])
        error.args, error.param = (message,), theirs or None
        if isinstance(error, InvalidDialog):
            error.index = None  # of the chat's messages, not of the client's
        raise


def _theirs(param: str, places: Sequence[str], names: Mapping[str, str]) -> str:
    found = _PLACE.fullmatch(param)
    if found is not None and int(found[1]) < len(places):
        return places[int(found[1])]
    name, rest = re.fullmatch(r"(\w*)(.*)", param, re.S).groups()  # type: ignore[union-attr]
    # Tools and formats are flat objects in these APIs.
    rest = rest.replace(".function", "", 1).replace(".parameters", f".{names.get('parameters', 'parameters')}", 1)
    rest = rest.replace(".json_schema.schema", ".schema", 1)
    return names.get(name, name) + rest
