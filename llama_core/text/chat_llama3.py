"""Llama 3's chat format, id for id as Meta's reference builds it.

Each piece is encoded on its own and control tokens are put between them as ids, so no text becomes one.
"""

from typing import Final

from llama_core.errors import ConfigError
from llama_core.text.chat_format import (
    NO_OPTIONS,
    ROLES,
    Admit,
    ChatFormat,
    ChatOptions,
    Dialog,
    check_messages,
)
from llama_core.text.tokenizers.tokenizer import Tokenizer

BEGIN: Final = "<|begin_of_text|>"
HEADER_START: Final = "<|start_header_id|>"
HEADER_END: Final = "<|end_header_id|>"
TURN_END: Final = "<|eot_id|>"
_STOPS: Final = (TURN_END, "<|end_of_text|>", "<|eom_id|>")
_RESULT_ROLE: Final = "ipython"  # a tool's result
# For clients that render chats themselves; the server never renders it. With the tokenizer's `bos_token` and `eos_token`, and
# the names of control tokens read as these tokens, it gives the ids that `encode` gives.
_CLIENT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


class Llama3ChatFormat(ChatFormat):
    """Bound to one tokenizer; immutable."""

    name = "llama3"
    is_quick = True
    template = None
    client_template = _CLIENT_TEMPLATE
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
            for role in (*ROLES, _RESULT_ROLE)
        }
        self.stop_ids = frozenset(ids[text] for text in _STOPS if text in ids)

    def check(self, dialog: Dialog) -> None:
        """Checks types and roles. As in the reference, roles may come in any order."""
        check_messages(dialog, _RESULT_ROLE)

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
