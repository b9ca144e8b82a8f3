"""The chat format of a model without one: every dialog is refused with the remedy. Completions work."""

from typing import NoReturn

from llama_core.errors import NoChatTemplate
from llama_core.text.chat_format import NO_OPTIONS, Admit, ChatFormat, ChatOptions, Dialog
from llama_core.text.tokenizers.tokenizer import Tokenizer


class NoChatFormat(ChatFormat):
    name = "none"
    is_quick = True
    template = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        pass

    def check(self, dialog: Dialog) -> None:
        self._refuse()

    def encode(self, dialog: Dialog, options: ChatOptions = NO_OPTIONS, admit: Admit | None = None) -> list[int]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NoChatTemplate(
            "this model has no chat template, so it answers /v1/completions only; for chats, start the server with "
            "chat_template=FILE, or with chat_format=llama2 or chat_format=llama3",
            param="messages",
        )
