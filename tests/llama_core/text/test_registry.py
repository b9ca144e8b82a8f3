"""Tokenizers are found by their file and chat formats by their name."""

from pathlib import Path

import pytest

from llama_core.errors import ConfigError, TokenizerError
from llama_core.text.chat_llama2 import Llama2ChatFormat
from llama_core.text.registry import check_vocabulary, find_chat_format, find_tokenizer, load_tokenizer, tokenizer_files
from llama_core.text.tokenizers.hugging_face_tokenizer import HuggingFaceTokenizer
from llama_core.text.tokenizers.tiktoken_tokenizer import TiktokenTokenizer
from tests.conftest import GOLDEN
from tests.support.vocabularies import make_family, write_tiktoken

MODEL = GOLDEN / "mp1" / "tokenizer.model"


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
