"""Llama 3's tokenizer.model: ids equal those of tiktoken with the same file, special names are Meta's, damage is refused."""

import base64
from functools import partial
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from llama_core.errors import TokenizerError
from llama_core.text.detokenizer import IncrementalDetokenizer
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizers.tiktoken_tokenizer import TiktokenTokenizer, special_names, split_long
from llama_core.text.tokenizers.tokenizer import TextPart
from tests.support.vocabularies import CORPUS, LLAMA3_SPLIT, byte_ranks, write_tiktoken
from tests.support.waiting import processor_s

RANKS = byte_ranks()
NAMES = {name: len(RANKS) + offset for offset, name in enumerate(special_names())}
REFERENCE = tiktoken.Encoding("reference", pat_str=LLAMA3_SPLIT, mergeable_ranks=RANKS, special_tokens=NAMES)
TEXTS = st.one_of(
    st.text(), st.lists(st.sampled_from([*CORPUS, "<|eot_id|>", "<|eot", "_id|>", " ", "\n"])).map("".join)
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TiktokenTokenizer:
    loaded = load_tokenizer(write_tiktoken(tmp_path_factory.mktemp("llama3") / "tokenizer.model"))
    assert isinstance(loaded, TiktokenTokenizer)
    return loaded


def test_special_tokens_are_metas(tokenizer: TiktokenTokenizer) -> None:
    names, first = special_names(), len(RANKS)
    assert len(names) == len(set(names)) == 256
    known = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 9: "eot_id", 2: "reserved_special_token_0"}
    known |= {12: "reserved_special_token_2", 255: "reserved_special_token_245"}
    assert {place: names[place] for place in known} == {place: f"<|{name}|>" for place, name in known.items()}
    assert (tokenizer.n_words, tokenizer.bos_id, tokenizer.eos_id) == (first + 256, first, first + 1)
    assert tokenizer.stop_ids == {first + 1, first + 8, first + 9}
    assert (tokenizer.token_name(first + 9), tokenizer.token_bytes(first + 9)) == ("<|eot_id|>", b"")


@given(text=TEXTS)
def test_ids_and_texts_equal_tiktoken(tokenizer: TiktokenTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, bos=False, eos=False)
    assert ids == REFERENCE.encode(text, disallowed_special=())
    assert tokenizer.encode_special(text) == REFERENCE.encode(text, allowed_special="all")
    assert tokenizer.encode_parts([TextPart(text[:5], False), TextPart(text[5:], False)]) == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.min_tokens(len(text)) <= len(ids)


@given(ids=st.lists(st.integers(0, len(RANKS) + 255), max_size=12))
def test_any_ids_decode_as_tiktoken(tokenizer: TiktokenTokenizer, ids: list[int]) -> None:
    assert tokenizer.decode(ids, skip_special_tokens=False) == REFERENCE.decode(ids)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.push([each]) for each in ids) + detokenizer.flush() == tokenizer.decode(ids)


def test_long_texts_are_cut_where_meta_cuts_them() -> None:
    text = "a" * 60_000 + " " * 25_001 + "b" * 400_000
    pieces = list(split_long(text))
    assert "".join(pieces) == text
    assert [len(piece) for piece in pieces[:3]] == [25_000, 25_000, 35_000]
    assert max(map(len, pieces)) <= 50_000 and list(split_long("")) == []
    assert list(split_long("ab " * 1000)) == ["ab " * 1000]


def test_hostile_texts_take_no_quadratic_time(tokenizer: TiktokenTokenizer) -> None:
    def there_and_back(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text, bos=False, eos=False)) == text

    for text in ("a" * 50_000, " " * 50_000, "a " * 25_000, "\n" * 50_000, "<|eot_id|>" * 5_000):
        once, four_times = (processor_s(partial(there_and_back, number * text)) for number in (1, 4))
        assert four_times < 9 * once, text[:10]


def _line(token: bytes, rank: int) -> bytes:
    return base64.b64encode(token) + b" %d\n" % rank


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 3], "line"),
        (lambda data: data[: data.index(b"\n", 900) + 1], "no token for the byte"),
        (lambda data: data + _line(b"zz", 7), "and the rank"),
        (lambda data: data + b"!!!! 5\n", "is not a token in base64"),
        (lambda data: data + b"abc %d\n" % len(RANKS), "not base64"),
        (lambda data: data + _line(b"a", len(RANKS)), "a token twice"),
        (lambda data: data + _line(b"x" * 2000, len(RANKS)), "a token of 2000 bytes"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, damage: object, message: str) -> None:
    path = write_tiktoken(tmp_path / "tokenizer.model")
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TokenizerError, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in caught.value.message
