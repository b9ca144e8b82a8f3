"""Finds the tokenizer class for a file, and the chat format with a name. Each implementation is one line in a table here."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, cast

from llama_core.errors import ConfigError
from llama_core.text.chat_format import ChatFormat
from llama_core.text.tokenizer import Tokenizer

# Name -> class, imported on first use. The first class that recognizes the file loads it; the last class recognizes every
# file, so that its error describes a file of unknown kind.
TOKENIZERS: Final[Mapping[str, str]] = {
    "sentencepiece": "llama_core.text.sentencepiece_tokenizer:SentencePieceTokenizer",
}
CHAT_FORMATS: Final[Mapping[str, str]] = {
    "llama2": "llama_core.text.chat_llama2:Llama2ChatFormat",
}
DEFAULT_CHAT_FORMAT: Final = "llama2"


class TokenizerClass(Protocol):
    """A class in TOKENIZERS."""

    def recognizes(self, path: Path) -> bool:
        """Whether the file is of this kind, by its name or its first bytes. False for a file that cannot be read."""

    def __call__(self, path: Path) -> Tokenizer:
        """Load and check the file. Raises TokenizerError that names it."""


class ChatFormatClass(Protocol):
    """A class in CHAT_FORMATS."""

    def __call__(self, tokenizer: Tokenizer) -> ChatFormat: ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in the file at `path`. Raises TokenizerError that names the file."""
    classes = [cast(TokenizerClass, _import(target)) for target in TOKENIZERS.values()]
    chosen = next((each for each in classes if each.recognizes(Path(path))), classes[-1])
    return chosen(Path(path))


def find_chat_format(name: str, tokenizer: Tokenizer) -> ChatFormat:
    """The chat format called `name`, for prompts in the ids of `tokenizer`. Raises ConfigError for an unknown name."""
    if name not in CHAT_FORMATS:
        raise ConfigError(f"chat_format must be one of {', '.join(CHAT_FORMATS)}", param="chat_format")
    return cast(ChatFormatClass, _import(CHAT_FORMATS[name]))(tokenizer)


def _import(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
