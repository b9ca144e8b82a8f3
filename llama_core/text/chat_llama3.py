"""Llama 3's chat format, id for id as Meta's reference builds it.

Each piece is encoded on its own and control tokens are put between them as ids, so no text becomes one.
"""

from typing import Final

from llama_core.errors import ConfigError
from llama_core.text.chat_format import (
    NO_OPTIONS,
    Admit,
    ChatFormat,
    ChatOptions,
    Dialog,
    invalid_message,
    messages_of,
)
from llama_core.text.client_templates import LLAMA3_TEMPLATE
from llama_core.text.tokenizers.tokenizer import Tokenizer, is_encodable

BEGIN: Final = "<|begin_of_text|>"
HEADER_START: Final = "<|start_header_id|>"
HEADER_END: Final = "<|end_header_id|>"
TURN_END: Final = "<|eot_id|>"
_STOPS: Final = (TURN_END, "<|end_of_text|>", "<|eom_id|>")
_ROLES: Final = ("system", "user", "assistant")
_RESULT_ROLE: Final = "ipython"  # a tool's result


class Llama3ChatFormat(ChatFormat):
    """Bound to one tokenizer; immutable."""

    name = "llama3"
    is_quick = True
    template = None
    result_role = _RESULT_ROLE

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for a tokenizer without Llama 3's control tokens."""
        ids = tokenizer.control_texts
        for text in (BEGIN, HEADER_START, HEADER_END, TURN_END):
            if text not in ids:
                raise ConfigError(
                    f"chat_format llama3 needs a tokenizer with {text}: set chat_format or chat_template to the model's own",
                    param="chat_format",
                )
        self._tokenizer = tokenizer
        self._begin, self._turn_end = ids[BEGIN], ids[TURN_END]
        self._headers = {
            role: [ids[HEADER_START], *self._text(role), ids[HEADER_END], *self._text("\n\n")]
            for role in (*_ROLES, _RESULT_ROLE)
        }
        self._stop_ids = frozenset(ids[text] for text in _STOPS if text in ids)

    @property
    def client_template(self) -> str:
        return LLAMA3_TEMPLATE

    @property
    def stop_ids(self) -> frozenset[int]:
        """The end of a turn, of a message that calls a tool, and of the text."""
        return self._stop_ids

    def check(self, dialog: Dialog) -> None:
        """Checks types and roles. As in the reference, roles may come in any order."""
        for index, message in messages_of(dialog):
            if message.get("role") not in (*_ROLES, _RESULT_ROLE):
                raise invalid_message(index, f"role must be one of {', '.join(_ROLES)}")
            if not isinstance(message.get("content"), str):
                raise invalid_message(index, "content must be a string")
            if not is_encodable(message["content"]):
                raise invalid_message(index, "content contains a lone surrogate, which is not a character")

    def min_tokens(self, dialog: Dialog) -> int:
        """The fewest tokens that the prompt can take. The format strips white space around contents."""
        num_chars = sum(len(message["content"].strip()) for message in dialog)
        return self._tokenizer.min_tokens(num_chars) + len(dialog)

    def encode(self, dialog: Dialog, options: ChatOptions = NO_OPTIONS, admit: Admit | None = None) -> list[int]:
        """Prompt ids. Raises InvalidDialog."""
        self.check(dialog)
        ids = [self._begin]
        for message in dialog:
            ids += [*self._headers[message["role"]], *self._text(message["content"].strip()), self._turn_end]
        if options.continue_final_message:
            return ids[:-1]
        return ids + self._headers["assistant"] if options.add_generation_prompt else ids

    def _text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, bos=False, eos=False)
