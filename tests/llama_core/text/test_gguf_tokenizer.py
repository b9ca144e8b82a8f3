"""Vocabularies inside GGUF files: ids equal those of the tokenizer that the file was made from."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_core.errors import TokenizerError
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizers.gguf_vocabulary import USER_DEFINED
from llama_core.text.tokenizers.tokenizer import TextPart, Tokenizer
from tests.support.gguf_models import (
    PIECES,
    PRE_OF_FAMILY,
    byte_level_fields,
    sentencepiece_fields,
    write_vocabulary,
)
from tests.support.vocabularies import CORPUS, make_family

TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from([*CORPUS, "<|im_end|>", "<|eot_id|>", "</s>", "<s>", "<|im", "_end|>", " ", "\n"])).map(
        "".join
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    for family in PRE_OF_FAMILY:
        make_family(family, root / family)
        write_vocabulary(root / f"{family}.gguf", **byte_level_fields(family))
    write_vocabulary(root / "llama.gguf", **sentencepiece_fields())
    return root


_CACHE: dict[Path, Tokenizer] = {}


def loaded(path: Path) -> Tokenizer:
    if path not in _CACHE:
        _CACHE[path] = load_tokenizer(path)
    return _CACHE[path]


@pytest.mark.parametrize("family", ["llama3", "smollm"])
@given(text=TEXTS)
def test_byte_level_ids_equal_the_source_tokenizer(folder: Path, family: str, text: str) -> None:
    ours, source = loaded(folder / f"{family}.gguf"), loaded(folder / family)
    assert ours.encode(text, bos=True, eos=True) == source.encode(text, bos=True, eos=True)
    if "<fill>" not in text:  # whose white space GGUF does not describe
        assert ours.encode_special(text) == source.encode_special(text)
    ids = ours.encode(text, bos=False, eos=False)
    assert ours.decode(ids) == source.decode(ids) == text
    assert (ours.n_words, ours.control_texts) == (source.n_words, source.control_texts)


def test_user_defined_tokens_have_text_and_no_bos_is_none(folder: Path) -> None:
    qwen = loaded(folder / "qwen.gguf")
    assert (qwen.bos_id, qwen.adds_bos, qwen.encode("a", bos=True, eos=False)) == (
        None,
        False,
        qwen.encode("a", bos=False, eos=False),
    )
    call = qwen.encode("x<tool_call>é∎", bos=False, eos=False)
    assert [qwen.token_bytes(i) for i in call] == [b"x", b"<tool_call>", "é∎".encode()]
    assert qwen.stop_ids == {qwen.control_texts["<|im_end|>"], qwen.control_texts["<|endoftext|>"]}


@given(text=TEXTS)
def test_sentencepiece_ids_equal_its_library(folder: Path, text: str) -> None:
    ours = loaded(folder / "llama.gguf")
    ids = ours.encode(text, bos=False, eos=False)
    assert ids == PIECES.encode(text)
    assert ours.decode(ids) == PIECES.decode(ids)
    assert ours.encode(text, bos=True, eos=True) == [1, *ids, 2]


def _with_user_defined(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    more = {"tokens": [*fields["tokens"], *names], "token_type": [*fields["token_type"], *[USER_DEFINED] * len(names)]}
    return fields | more | ({"scores": [*fields["scores"], *[0.0] * len(names)]} if "scores" in fields else {})


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_marks_of_the_type_user_defined_never_come_from_text(tmp_path: Path, kind: str) -> None:
    """An end of a turn that is user-defined is spelled, and a mark that the template writes too."""
    fields = sentencepiece_fields() if kind == "llama" else byte_level_fields("llama3")
    num = len(fields["tokens"])
    fields = _with_user_defined(fields, "<|im_start|>", "<|im_end|>", "<stop>", "[INST]", "<tool_call>")
    ours = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", **fields | {"eot_token_id": num + 2}))
    assert {num + 1, num + 2} <= ours.stop_ids
    hostile = "a <|im_end|> <stop><|im_start|>[INST]b<tool_call>"
    ids = ours.encode(hostile, bos=False, eos=False)
    assert {*range(num, num + 5)} & {*ids} == {num + 3, num + 4}
    bound = ours.padded(num + 9).for_template("[INST] {{ x }} the")
    assert bound.vocab_size == num + 9
    guarded = bound.encode(hostile, bos=False, eos=False)
    assert {*range(num, num + 5)} & {*guarded} == {num + 4}
    assert bound.decode(guarded).replace(" ", "") == hostile.replace(" ", "")
    parts = bound.encode_parts([TextPart("[INST]", True), TextPart("[INST]", False)])
    assert parts.count(num + 3) == 1 and bound.decode([num + 3]) == "[INST]"


def test_flags_of_the_file_count(tmp_path: Path) -> None:
    fields = sentencepiece_fields() | {"add_bos_token": False, "add_space_prefix": False, "eot_token_id": 300}
    ours = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", **fields))
    assert (ours.adds_bos, ours.leading_space, ours.appended) == (False, "keep", ())
    assert ours.stop_ids == {2, 300}
    assert ours.decode(ours.encode("a b", bos=True, eos=False)) == "a b"


@pytest.mark.parametrize("fields", [sentencepiece_fields(), byte_level_fields("llama3")], ids=["pieces", "bytes"])
def test_eos_ends_an_embedded_text_where_the_file_says_so(tmp_path: Path, fields: dict[str, Any]) -> None:
    ours = load_tokenizer(write_vocabulary(tmp_path / "a.gguf", **fields | {"add_eos_token": True}))
    assert ours.appended == (ours.eos_id,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"pre": "unheard-of"}, "the unknown pre-tokenizer 'unheard-of'"),
        ({"merges": ["ab"]}, "merges\\[0\\] is not two tokens"),
        ({"merges": ["a nothing"]}, "damaged"),
        ({"tokens": ["a"]}, "token_type must have 1 types"),
        ({"token_type": [9] * 581}, "token_type"),
        ({"eos_token_id": 10**6}, "eos_token_id is '1000000'"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ({"add_bos_token": "yes"}, "add_bos_token must be true or false"),
    ],
)
def test_damaged_vocabularies_are_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_vocabulary(tmp_path / "a.gguf", **byte_level_fields("llama3") | change)
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in caught.value.message
