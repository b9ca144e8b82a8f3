"""Llama 3's built-in chat format has Meta's order of ids."""

from pathlib import Path
from typing import Any

import pytest

from llama_core.text.registry import find_chat_format, load_tokenizer, open_chat_format
from llama_core.text.tokenizers.tokenizer import Tokenizer
from tests.support.chat_templates import make_chat_model

DIALOG: list[Any] = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "Hi <|eot_id|>"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": ""},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_chat_model("llama3", tmp_path_factory.mktemp("llama3")) / "tokenizer.json")


def reference(tokenizer: Tokenizer, dialog: list[Any]) -> list[int]:
    """As Meta's reference: header, content and end of each message, then the assistant's header."""
    ids = tokenizer.control_texts

    def text(s: str) -> list[int]:
        return tokenizer.encode(s, bos=False, eos=False)

    def header(role: str) -> list[int]:
        return [ids["<|start_header_id|>"], *text(role), ids["<|end_header_id|>"], *text("\n\n")]

    tokens = [ids["<|begin_of_text|>"]]
    for message in dialog:
        tokens += [*header(message["role"]), *text(message["content"].strip()), ids["<|eot_id|>"]]
    return tokens + header("assistant")


def test_ids_are_those_of_the_reference(tokenizer: Tokenizer) -> None:
    chat = find_chat_format("llama3", tokenizer)
    for length in range(1, 5):
        assert chat.encode(DIALOG[:length]) == reference(tokenizer, DIALOG[:length])
        assert len(chat.encode(DIALOG[:length])) >= chat.min_tokens(DIALOG[:length])
    assert chat.stop_ids >= {tokenizer.control_texts["<|eot_id|>"], tokenizer.control_texts["<|eom_id|>"]}


def test_a_folder_of_metas_with_llama_3s_tokens_has_this_format(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    assert open_chat_format("auto", tokenizer, tmp_path).name == "llama3"
