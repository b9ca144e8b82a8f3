"""Tokenizers are found by their file and chat formats by their name; one line in a table adds one of either."""

from pathlib import Path

import pytest

from llama_core.errors import ConfigError, InvalidParameter, TokenizerError
from llama_core.text import registry
from llama_core.text.chat_llama2 import Llama2ChatFormat
from llama_core.text.detokenizer import IncrementalDetokenizer
from llama_core.text.hugging_face_tokenizer import HuggingFaceTokenizer
from llama_core.text.registry import check_vocabulary, find_chat_format, find_tokenizer, load_tokenizer, tokenizer_files
from llama_core.text.sentencepiece_tokenizer import SentencePieceTokenizer
from llama_core.text.tiktoken_tokenizer import TiktokenTokenizer
from llama_core.text.tokenizer import TextPart, Tokenizer
from llama_core.text.vocabulary_tokenizer import Vocabulary, VocabularyTokenizer
from tests.conftest import GOLDEN
from tests.support.vocabularies import make_family, write_tiktoken

MODEL = GOLDEN / "mp1" / "tokenizer.model"


class ByteTokenizer(VocabularyTokenizer):
    """One id for each byte, as a byte-level BPE without merges; 256 and 257 are BOS and EOS, 258 ends a turn."""

    def __init__(self, path: Path, num_rows: int | None = None) -> None:
        names = {"<bos>": 256, "<eos>": 257, "<|eot_id|>": 258}
        raws = [bytes([byte]) for byte in range(256)] + [b""] * 3
        super().__init__(Vocabulary(raws, names, bos_id=256, eos_id=257, adds_bos=True))

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        return path.suffix == ".bytes"

    def _encode_plain(self, text: str, is_first: bool) -> list[int]:
        return list(text.encode())


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
    with pytest.raises(ConfigError, match="chat_format must be one of auto, template, llama2, llama3") as caught:
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


def test_only_trusted_parts_of_a_prompt_become_control_tokens(byte_tokenizer: Tokenizer) -> None:
    eot = "<|eot_id|>"
    assert byte_tokenizer.stop_ids == {257, 258}
    assert byte_tokenizer.encode(eot, bos=False, eos=False) == list(eot.encode())
    assert byte_tokenizer.encode_special(f"a{eot}b", bos=True) == [256, ord("a"), 258, ord("b")]
    parts = [TextPart("<bos>", True), TextPart(f"{eot}<|eot", False), TextPart("_id|>", True), TextPart(eot, True)]
    assert byte_tokenizer.encode_parts(parts) == [256, *f"{eot}{eot}".encode(), 258]


def test_padding_ids_of_a_model_have_no_text(byte_tokenizer: Tokenizer) -> None:
    padded = byte_tokenizer.padded(300)
    assert (padded.n_words, padded.vocab_size, byte_tokenizer.vocab_size) == (259, 300, 259)
    assert (padded.token_bytes(299), padded.token_name(299)) == (b"", "<unused-299>")
    assert padded.decode([97, 299, 98]) == "ab"
    with pytest.raises(InvalidParameter, match="from 0 to 299"):
        padded.token_bytes(300)
    with pytest.raises(InvalidParameter, match="less than the tokenizer's 259"):
        byte_tokenizer.padded(258)


def test_names_of_control_tokens_are_shown_on_request(byte_tokenizer: Tokenizer) -> None:
    ids = [256, *"é".encode(), 258]
    assert byte_tokenizer.decode(ids) == "é"
    assert byte_tokenizer.decode(ids, skip_special_tokens=False) == "<bos>é<|eot_id|>"
    assert byte_tokenizer.decode([0xC3, 258, 0xA9]) == "é"
    assert byte_tokenizer.decode([0xC3, 258, 0xA9], skip_special_tokens=False) == "\ufffd<|eot_id|>\ufffd"


def test_a_tokenizer_given_apart_with_far_fewer_tokens_than_rows_is_refused() -> None:
    check_vocabulary(MODEL, 115_500, "/models/llama-3", 128_256)
    check_vocabulary(MODEL, 1280, MODEL.parent, 128_256)
    with pytest.raises(
        ConfigError, match=r"tokenizer\.model: has 1,280 tokens, but /models/llama-3 has 128,256 rows"
    ) as caught:
        check_vocabulary(MODEL, 1280, "/models/llama-3", 128_256)
    assert caught.value.param == "tokenizer_path" and "leave it out where" in caught.value.message


def test_a_folder_gives_the_tokenizer_of_its_format(tmp_path: Path) -> None:
    assert find_tokenizer(MODEL) == MODEL and find_tokenizer(MODEL.parent) == MODEL
    folder = make_family("llama3", tmp_path / "hf").parent
    (folder / "tokenizer.model").write_bytes(b"not read")
    (folder / "generation_config.json").write_text("{}")
    assert isinstance(load_tokenizer(folder), HuggingFaceTokenizer)
    names = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    assert tokenizer_files(folder) == [folder / name for name in names]
    (folder / "params.json").write_text("{}")
    assert tokenizer_files(folder) == [folder / "tokenizer.model"]
    assert isinstance(load_tokenizer(write_tiktoken(tmp_path / "meta" / "tokenizer.model").parent), TiktokenTokenizer)
