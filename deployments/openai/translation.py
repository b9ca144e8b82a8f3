"""Bodies of other APIs as the body of a chat: errors of the chat name the fields that the client sent."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from deployments.engine.interface import Engine
from deployments.openai.plan import Plan, encode_chat, plan_chat
from deployments.openai.prompt_encoder import PromptEncoder
from deployments.openai.schemas import ChatBody
from deployments.openai.validation import KIND_MARK, validate
from llama_core.errors import InvalidDialog, InvalidRequest

_PLACE = re.compile(r"messages\[(\d+)\](\.[\w.\[\]]*)?")
_TOOL = re.compile(r"tools\[(\d+)\]\.function(.*)", re.S)


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


class ClientsWords(NamedTuple):
    """places, tools: of each message and each tool of a chat, the place in the client's body. names: of other fields."""

    places: Sequence[str]
    tools: Sequence[str]
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TranslatedChat:
    """A chat's body. words: those of the client for its fields, which errors name."""

    body: ChatBody
    words: ClientsWords

    async def plan(self, engine: Engine, encoder: PromptEncoder) -> Plan:
        """Raises what `plan_chat` raises."""
        with _in_the_clients_words(self.words):
            return await plan_chat(self.body, engine, encoder)

    async def prompt(self, encoder: PromptEncoder) -> list[int]:
        """Raises what `encode_chat` raises."""
        with _in_the_clients_words(self.words):
            return await encode_chat(self.body, encoder)


def translated(
    fields: Mapping[str, Any], messages: ChatMessages, names: Mapping[str, str], tools: Sequence[str]
) -> TranslatedChat:
    """`fields` and `messages` as a chat. tools: the places of its tools. Raises InvalidRequest in the client's words."""
    words = ClientsWords(messages.places, tools, names)
    with _in_the_clients_words(words):
        body = validate(ChatBody, {**fields, "messages": messages.messages})
    return TranslatedChat(body, words)


@contextmanager
def _in_the_clients_words(words: ClientsWords) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        ours = error.param or ""
        theirs = _theirs(ours, words)
        message = error.message
        if ours and message.startswith(ours):
            message = theirs + message.removeprefix(ours)
        elif (found := _PLACE.match(message)) is not None:
            message = _theirs(found[0], words) + message.removeprefix(found[0])
        error.args, error.param = (message,), theirs or None
        if isinstance(error, InvalidDialog):
            error.index = None  # of the chat's messages, not of the client's
        raise


def _theirs(param: str, words: ClientsWords) -> str:
    places, tools, names = words
    found = _PLACE.fullmatch(param)
    if found is not None and int(found[1]) < len(places):
        return places[int(found[1])]
    parameters = f".{names.get('parameters', 'parameters')}"
    if (found := _TOOL.fullmatch(param)) is not None:
        return tools[int(found[1])] + found[2].replace(".parameters", parameters, 1)
    name, rest = re.fullmatch(r"(\w*)(.*)", param, re.S).groups()  # type: ignore[union-attr]
    return names.get(name, name) + rest.replace(".json_schema.schema", ".schema", 1)  # formats are flat in these APIs
