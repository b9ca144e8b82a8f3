"""Tokenizers are found by their file and chat formats by their name; one line in a table adds one of either."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from llama_core.errors import ConfigError, TokenizerError
from llama_core.text import registry
from llama_core.text.chat_llama2 import Llama2ChatFormat
from llama_core.text.detokenizer import IncrementalDetokenizer
from llama_core.text.registry import find_chat_format, load_tokenizer
from llama_core.text.sentencepiece_tokenizer import SentencePieceTokenizer
from llama_core.text.tokenizer import LeadingSpace, Tokenizer, name_of_bytes
from tests.conftest import GOLDEN

MODEL = GOLDEN / "mp1" / "tokenizer.model"


class ByteTokenizer(Tokenizer):
    """One id for each byte, as a byte-level BPE without merges; 256 and 257 are BOS and EOS, 258 ends a turn."""

    n_words, bos_id, eos_id = 259, 256, 257
    stop_ids = frozenset({257, 258})
    leading_space: LeadingSpace = "keep"

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        return path.suffix == ".bytes"

    def min_tokens(self, num_chars: int) -> int:
        return num_chars

    def encode(self, s: str, *, bos: bool, eos: bool) -> list[int]:
        return [self.bos_id] * bos + list(s.encode()) + [self.eos_id] * eos

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if self.is_control(token_id) else bytes([token_id])

    def token_name(self, token_id: int) -> str:
        return name_of_bytes(self.token_bytes(token_id))

    def leads_with_space(self, token_id: int) -> bool:
        return False

    def is_control(self, token_id: int) -> bool:
        return token_id > 255


@pytest.fixture
def byte_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tokenizer:
    monkeypatch.setattr(registry, "TOKENIZERS", {"bytes": f"{__name__}:ByteTokenizer"} | dict(registry.TOKENIZERS))
    return load_tokenizer(tmp_path / "any.bytes")


def test_a_sentencepiece_file_is_found(byte_tokenizer: Tokenizer) -> None:
    assert isinstance(load_tokenizer(MODEL), SentencePieceTokenizer)
    assert isinstance(byte_tokenizer, ByteTokenizer)


def test_a_file_of_no_known_kind_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(TokenizerError, match=str(path)):
            load_tokenizer(path)


def test_an_unknown_chat_format_is_refused_with_the_known_names() -> None:
    tokenizer = load_tokenizer(MODEL)
    assert isinstance(find_chat_format("llama2", tokenizer), Llama2ChatFormat)
    with pytest.raises(ConfigError, match="chat_format must be one of llama2") as caught:
        find_chat_format("llama5", tokenizer)
    assert caught.value.param == "chat_format"


def test_another_tokenizer_streams_and_chats(byte_tokenizer: Tokenizer) -> None:
    text = " café \U0001f600"
    detokenizer = IncrementalDetokenizer(byte_tokenizer)
    parts = [detokenizer.push([token]) for token in byte_tokenizer.encode(text, bos=True, eos=True)]
    assert "".join(parts) + detokenizer.flush() == text
    prompt = find_chat_format("llama2", byte_tokenizer).encode([{"role": "user", "content": "Hi"}])
    assert prompt == [256, *b"[INST] Hi [/INST]"]
    assert byte_tokenizer.token_name(0xF0) == "bytes:\\xf0"
