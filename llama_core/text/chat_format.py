"""The Protocol of a chat format: a dialog to prompt ids. `registry.find_chat_format` finds one by its name.

Knows nothing of generation.
"""

from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypedDict

Role = Literal["system", "user", "assistant"]

# The reference's answer to a dialog that contains the format's own tags.
SAFE_RESPONSE: Final = "Error: special tags are not allowed as part of the prompt."


class Message(TypedDict):
    role: Role
    content: str


Dialog = Sequence[Message]


class ChatFormat(Protocol):
    """The prompt that a family of chat models was trained on. Bound to one tokenizer; immutable."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end the assistant's message, beside those of the tokenizer."""

    def check(self, dialog: Dialog) -> None:
        """Raises InvalidDialog that names the index of the first message with a wrong type, role or content. Cheap."""

    def min_tokens(self, dialog: Dialog) -> int:
        """The fewest tokens that the prompt of `dialog` can take, from the lengths of its contents, to refuse a long dialog
        without encoding it. `dialog` need not be well formed, but every content is text."""

    def encode(self, dialog: Dialog) -> list[int]:
        """Prompt ids of `dialog`. Raises what `check` raises, and SpecialTags that names the index of a message with a tag."""
