"""The tokenizer equals the reference's, refuses damaged files, and never turns text into a control token."""

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from llama_core.errors import InvalidRequest, TokenizerError
from llama_core.text.tokenizers.sentencepiece_tokenizer import MAX_MODEL_FILE_BYTES, SentencePieceTokenizer

GOLDEN_DIR = Path(__file__).parents[2] / "data" / "golden"
MODEL = GOLDEN_DIR / "mp1" / "tokenizer.model"
GOLDEN = json.loads((GOLDEN_DIR / "golden.json").read_text())
TOKENIZER = SentencePieceTokenizer(MODEL)
REFERENCE = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))


def test_properties_are_those_of_llama_2() -> None:
    assert TOKENIZER.n_words == 640
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id) == (1, 2)
    assert TOKENIZER.stop_ids == {2}
    assert [i for i in range(640) if TOKENIZER.is_control(i)] == [1, 2]
    assert TOKENIZER.leading_space == "drop_one"


@given(st.one_of(st.text(), st.lists(st.sampled_from(GOLDEN["completions"][0]["prompts"])).map(" ".join)))
def test_encode_and_decode_equal_sentencepiece(text: str) -> None:
    ids = TOKENIZER.encode(text, bos=False, eos=False)
    assert ids == REFERENCE.encode(text)
    assert TOKENIZER.decode(ids) == REFERENCE.decode(ids) and TOKENIZER.min_tokens(len(text)) <= len(ids)


@given(st.lists(st.sampled_from(["<s>", "</s>", "<unk>", "<0x0A>", "<pad>", " ", "a", "\x00", "\u2581", "<", "s>"])))
def test_no_text_becomes_a_control_token(parts: list[str]) -> None:
    assert not any(TOKENIZER.is_control(i) for i in TOKENIZER.encode("".join(parts), bos=False, eos=False))


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ude00\ud83d"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        TOKENIZER.encode(text, bos=True, eos=False)


def test_token_bytes_are_the_bytes_that_each_token_adds() -> None:
    text = "The caf\u00e9 \U0001f600 on\nfire"
    ids = TOKENIZER.encode(text, bos=True, eos=True)
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == " " + text
    assert [TOKENIZER.token_bytes(i) for i in range(3, 259)] == [bytes([b]) for b in range(256)]
    assert TOKENIZER.token_bytes(0) == " \u2047 ".encode()
    assert TOKENIZER.token_bytes(1) == TOKENIZER.token_bytes(2) == b""


# Damaged files


def assert_refused(path: Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        SentencePieceTokenizer(path)
    assert str(path) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("data", [b"", b"\x00", b"hello world\n" * 100, random.Random(0).randbytes(5000), b"\xff" * 99])
def test_files_of_another_kind_are_refused_by_name(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    assert_refused(path)


def test_a_missing_file_a_directory_and_a_huge_file_are_refused_by_name(tmp_path: Path) -> None:
    assert_refused(tmp_path / "absent.model")
    assert_refused(tmp_path)
    huge = tmp_path / "huge.model"
    with huge.open("wb") as file:
        file.truncate(MAX_MODEL_FILE_BYTES + 1)
    assert str(MAX_MODEL_FILE_BYTES) in assert_refused(huge)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"byte_fallback": False}, "BPE model with byte fallback"),
        ({"model_type": "unigram"}, "BPE model with byte fallback"),
        ({"bos_id": -1}, "no BOS"),
        ({"eos_id": -1}, "no EOS"),
    ],
)
def test_a_sentencepiece_model_of_another_kind_is_refused(
    options: dict[str, object], problem: str, tmp_path: Path
) -> None:
    assert problem in assert_refused(train(tmp_path, **options))


def test_text_that_looks_like_a_control_symbol_stays_text(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(train(tmp_path, control_symbols=["~", "[INST]"]))
    assert [i for i in range(6) if tokenizer.is_control(i)] == [1, 2, 3, 4]
    assert tokenizer.decode(tokenizer.encode("a ~ b [INST]", bos=False, eos=False)) == "a ~ b [INST]"


def train(folder: Path, **options: Any) -> Path:
    """A small model with Llama's options, except for `options`."""
    model = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "byte_fallback": True,
        "vocab_size": 330,
        "hard_vocab_limit": False,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "a dog ran to the cat [INST] said"] * 20),
        model_writer=model,
        **(settings | options),
    )
    path = folder / "trained.model"
    path.write_bytes(model.getvalue())
    return path
