"""The tokenizer equals the reference's, refuses damaged files, and never turns text into a control token."""

import io
import json
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from llama_core.errors import InvalidParameter, InvalidRequest, SpecialTags, TokenizerError
from llama_core.text.sentencepiece_tokenizer import MAX_MODEL_FILE_BYTES, SentencePieceTokenizer

GOLDEN_DIR = Path(__file__).parents[2] / "data" / "golden"
MODEL = GOLDEN_DIR / "mp1" / "tokenizer.model"
GOLDEN = json.loads((GOLDEN_DIR / "golden.json").read_text())
TOKENIZER = SentencePieceTokenizer(MODEL)
REFERENCE = sentencepiece.SentencePieceProcessor(model_file=str(MODEL))


def test_properties_are_those_of_llama_2() -> None:
    assert TOKENIZER.n_words == 640
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id) == (1, 2, -1)
    assert TOKENIZER.stop_ids == {2}
    assert [i for i in range(640) if TOKENIZER.is_control(i)] == [1, 2]
    assert TOKENIZER.leading_space == "drop_one"


def test_completion_prompts_encode_id_for_id_as_the_reference() -> None:
    for case in GOLDEN["completions"]:
        assert [TOKENIZER.encode(prompt, bos=True, eos=False) for prompt in case["prompts"]] == case["prompt_tokens"]


def test_generated_tokens_decode_as_the_reference() -> None:
    compared = 0
    for case in GOLDEN["completions"]:
        for ids, result in zip(case["out_tokens"], case["text_completion"], strict=True):
            assert TOKENIZER.decode(ids) == result["generation"]
            if "tokens" in result:
                assert [TOKENIZER.token_text(token_id) for token_id in ids] == result["tokens"]
                compared += 1
    assert compared > 0


def test_bos_and_eos_are_added_only_when_asked() -> None:
    plain = TOKENIZER.encode("hi", bos=False, eos=False)
    assert not {1, 2} & set(plain)
    assert TOKENIZER.encode("hi", bos=True, eos=True) == [1, *plain, 2]


@given(st.text())
def test_encode_and_decode_equal_sentencepiece(text: str) -> None:
    ids = TOKENIZER.encode(text, bos=False, eos=False)
    assert ids == REFERENCE.encode(text)
    assert TOKENIZER.decode(ids) == REFERENCE.decode(ids)


@given(st.lists(st.sampled_from(["<s>", "</s>", "<unk>", "<0x0A>", "<pad>", " ", "a", "\x00", "\u2581", "<", "s>"])))
def test_no_text_becomes_a_control_token(parts: list[str]) -> None:
    assert not any(TOKENIZER.is_control(i) for i in TOKENIZER.encode("".join(parts), bos=False, eos=False))


@pytest.mark.parametrize(
    "text",
    ["</s>", "<s>", "a\x00b", "\x01\x1b[31m\x7f", "\u202eabc", "\ufeffa", "\U0001f600", "\U0010ffff", "a\r\n\tb"],
)
def test_odd_characters_are_literal_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, bos=True, eos=True)) == text


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ude00\ud83d"])
def test_lone_surrogates_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        TOKENIZER.encode(text, bos=True, eos=False)


@pytest.mark.parametrize("bad", [-1, 640, 2**31, 2**70, 1.5, "a", None])
def test_a_value_that_is_not_a_token_id_is_refused(bad: int) -> None:
    for call in (TOKENIZER.token_text, TOKENIZER.token_bytes, TOKENIZER.is_control, lambda i: TOKENIZER.decode([5, i])):
        with pytest.raises(InvalidParameter, match="from 0 to 639"):
            call(bad)


def test_token_bytes_are_the_bytes_that_each_token_adds() -> None:
    text = "The caf\u00e9 \U0001f600 on\nfire"
    ids = TOKENIZER.encode(text, bos=True, eos=True)
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == " " + text
    assert [TOKENIZER.token_bytes(i) for i in range(3, 259)] == [bytes([b]) for b in range(256)]
    assert TOKENIZER.token_bytes(0) == " \u2047 ".encode()
    assert TOKENIZER.token_bytes(1) == TOKENIZER.token_bytes(2) == b""


@given(st.one_of(st.text(), st.lists(st.sampled_from(GOLDEN["completions"][0]["prompts"])).map(" ".join)))
def test_min_tokens_never_exceeds_the_real_number(text: str) -> None:
    assert TOKENIZER.min_tokens(len(text)) <= len(TOKENIZER.encode(text, bos=False, eos=False))


def test_min_tokens_refuses_ten_megabytes() -> None:
    assert TOKENIZER.max_piece_chars == max(len(REFERENCE.id_to_piece(i)) for i in range(259, 640))
    assert TOKENIZER.min_tokens(10_000_000) > 500_000


def test_a_tokenizer_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(TOKENIZER))
    assert copy.encode("hello", bos=True, eos=True) == TOKENIZER.encode("hello", bos=True, eos=True)


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


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data, path = MODEL.read_bytes(), tmp_path / "cut.model"
    # SentencePiece itself would load files cut between two sections, which lie near the end.
    for num_bytes in (*range(0, len(data), 37), *range(len(data) - 120, len(data))):
        path.write_bytes(data[:num_bytes])
        assert_refused(path)


def test_flipped_bits_are_refused_or_harmless(tmp_path: Path) -> None:
    data, path, rng = MODEL.read_bytes(), tmp_path / "flipped.model", random.Random(7)
    num_refused = 0
    for case in range(300):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 3, 30])):
            damaged[rng.randrange(len(data) - 200 if case % 2 else 0, len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            tokenizer = SentencePieceTokenizer(path)
        except TokenizerError:
            num_refused += 1
        else:
            tokenizer.decode(tokenizer.encode("hello w\u00f6rld \U0001f600\x00", bos=True, eos=True))
            tokenizer.decode(range(tokenizer.n_words))
    assert 0 < num_refused < 300


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


RULES_FUZZ = """
import random, sys
from pathlib import Path
from llama_core.errors import TokenizerError
from llama_core.text.sentencepiece_tokenizer import SentencePieceTokenizer
data, path, rng = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), random.Random(5)
end = len(data) - 200  # after the pieces and the trainer's settings come the normalizer's compiled rules
num_refused = 0
for case in range(150):
    damaged = bytearray(data)
    for _ in range(rng.choice([1, 4, 64, 4096])):
        damaged[rng.randrange(end // 4 if case % 3 else 0, len(data))] = rng.choice([0, 255, rng.randrange(256)])
    path.write_bytes(damaged)
    try:
        tokenizer = SentencePieceTokenizer(path)
        tokenizer.decode(tokenizer.encode("Stra\u00dfe \uff21 \u3000 \u0fb3" * 9, bos=True, eos=True))
    except TokenizerError:
        num_refused += 1
print(num_refused)
"""


def test_damaged_normalization_rules_crash_no_process(tmp_path: Path) -> None:
    """SentencePiece reads the rules from a compiled table. In another process, because a bad table may cause a segmentation
    fault."""
    model = train(tmp_path, normalization_rule_name="nmt_nfkc")
    command = [sys.executable, "-c", RULES_FUZZ, str(model), str(tmp_path / "damaged.model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert 0 < int(done.stdout) <= 150


def test_text_that_looks_like_a_control_symbol_stays_text(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(train(tmp_path, control_symbols=["~", "[INST]"]))
    assert [i for i in range(6) if tokenizer.is_control(i)] == [1, 2, 3, 4]
    assert tokenizer.decode(tokenizer.encode("a ~ b [INST]", bos=False, eos=False)) == "a ~ b [INST]"


def test_text_that_encodes_to_a_control_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SentencePieceTokenizer(MODEL)
    monkeypatch.setattr(tokenizer, "_never_from_text", frozenset(REFERENCE.encode("hi")))
    with pytest.raises(SpecialTags):
        tokenizer.encode("hi", bos=False, eos=False)


def test_min_tokens_is_0_for_a_tokenizer_that_rewrites_text(tmp_path: Path) -> None:
    tokenizer = SentencePieceTokenizer(train(tmp_path, remove_extra_whitespaces=True))
    assert tokenizer.encode(" " * 10_000, bos=False, eos=False) == []
    assert tokenizer.min_tokens(10_000) == 0


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
