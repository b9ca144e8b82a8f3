"""A model's text: its tokenizer, the form of its chats, and the form of its answers."""

from pathlib import Path
from typing import NamedTuple

from llama_core.text.answer_format import AnswerFormat, open_answer_format
from llama_core.text.chat_format import ChatFormat
from llama_core.text.registry import open_chat_format
from llama_core.text.tokenizers.tokenizer import Tokenizer


class TextOptions(NamedTuple):
    """The arguments of the server with these names. chat_template: a path, or the text itself."""

    chat_format: str
    chat_template: str | None
    tool_format: str


class ModelText(NamedTuple):
    tokenizer: Tokenizer
    chat_format: ChatFormat
    answer_format: AnswerFormat


def open_model_text(tokenizer: Tokenizer, vocab_size: int, checkpoint: Path, options: TextOptions) -> ModelText:
    """vocab_size: rows of the model's embedding. checkpoint: where the template is. Raises ConfigError or TokenizerError."""
    padded = tokenizer.padded(vocab_size)
    chat_format = open_chat_format(options.chat_format, padded, checkpoint, options.chat_template)
    guarded = chat_format.guard(padded)
    return ModelText(guarded, chat_format, open_answer_format(options.tool_format, guarded, chat_format))
