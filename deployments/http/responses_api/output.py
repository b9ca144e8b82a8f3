"""The output items of a response, as far as they have been generated."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from llama_core.text.tools.pieces import Arguments, CallStart, Content, Piece, Reasoning

Fields = dict[str, object]
Namespaces = Mapping[str, tuple[str, str]]  # as `ResponsesBody.namespaces`


@dataclass
class OutputItem(ABC):
    """One item: its text in parts, and the names of its events."""

    id_prefix: ClassVar[str]
    delta_event: ClassVar[str]
    done_event: ClassVar[str]
    text_field: ClassVar[str]  # of the event that ends the text
    indexed: ClassVar[Fields]  # further fields of these events
    new_id: Callable[[str], str]  # as `SingleAnswer.new_id`
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = self.new_id(self.id_prefix)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @abstractmethod
    def written(self, status: str) -> Fields:
        """The item. status: in_progress, completed or incomplete."""

    def part(self, text: str) -> Fields | None:
        """The content part that holds `text`; None if the item has none."""
        return None

    def _content(self, status: str) -> list[Fields]:
        part = None if status == "in_progress" else self.part(self.text)
        return [] if part is None else [part]


class MessageOutput(OutputItem):
    id_prefix, text_field = "msg_", "text"
    delta_event, done_event = "response.output_text.delta", "response.output_text.done"
    indexed: ClassVar[Fields] = {"content_index": 0, "logprobs": []}

    def written(self, status: str) -> Fields:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": self._content(status),
        }

    def part(self, text: str) -> Fields:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ReasoningOutput(OutputItem):
    id_prefix, text_field = "rs_", "text"
    delta_event, done_event = "response.reasoning_text.delta", "response.reasoning_text.done"
    indexed: ClassVar[Fields] = {"content_index": 0}

    def written(self, status: str) -> Fields:
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": self._content(status),
            "encrypted_content": None,
            "status": status,
        }

    def part(self, text: str) -> Fields:
        return {"type": "reasoning_text", "text": text}


class CallOutput(OutputItem):
    id_prefix, text_field = "fc_", "arguments"
    delta_event, done_event = "response.function_call_arguments.delta", "response.function_call_arguments.done"
    indexed: ClassVar[Fields] = {}

    def __init__(self, new_id: Callable[[str], str], name: str, namespaces: Namespaces) -> None:
        super().__init__(new_id)
        self._call = {"call_id": new_id("call_"), "name": name}
        if name in namespaces:
            self._call["namespace"], self._call["name"] = namespaces[name]

    def written(self, status: str) -> Fields:
        return {"id": self.id, "type": "function_call", "status": status, **self._call, "arguments": self.text}


def opened_by(piece: Piece, namespaces: Namespaces, new_id: Callable[[str], str]) -> OutputItem:
    """The item that a piece begins."""
    assert not isinstance(piece, Arguments), "arguments follow the beginning of their call"
    if isinstance(piece, CallStart):
        return CallOutput(new_id, piece.name, namespaces)
    return ReasoningOutput(new_id) if isinstance(piece, Reasoning) else MessageOutput(new_id)


def extends(piece: Piece, item: OutputItem | None) -> bool:
    """Whether a piece is more of this item."""
    kinds = {Arguments: CallOutput, Reasoning: ReasoningOutput, Content: MessageOutput}
    return type(piece) in kinds and isinstance(item, kinds[type(piece)])
