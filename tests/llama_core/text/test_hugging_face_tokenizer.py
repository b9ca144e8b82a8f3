"""Ids and texts equal transformers', and no text becomes a control token."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from llama_core.errors import TokenizerError
from llama_core.text.detokenizer import IncrementalDetokenizer
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizers.probe import probe_tokenizer
from llama_core.text.tokenizers.tokenizer import TextPart, Tokenizer
from tests.support.full_runs import examples
from tests.support.vocabularies import FAMILIES, byte_level, make_family, write_folder

FRAGMENTS = (
    *"ab é日🦙\u0301\u00a0▁\n\t<|>", "  ", "the ", "don't", "1234", "<|im_end|>", "<|eot_id|>", "<s>", "</s>", "<unk>",
    " <fill> ", "<tool_call>", "é∎", "<|im", "_end|>", "[INST]", "<0x0A>", "\u1100\u1161", "\ufdd0", "\0",
)  # fmt: skip
LENGTHENING = ("llama3", "prefix_space", "llama2_legacy", "metaspace")  # the others may make a text shorter
TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_family(family, root / family)
    _loaded.cache_clear()
    return root


@cache
def _loaded(root: Path, family: str) -> tuple[Tokenizer, Any]:
    return load_tokenizer(root / family / "tokenizer.json"), AutoTokenizer.from_pretrained(root / family)


@pytest.mark.parametrize("family", FAMILIES)
def test_special_ids_equal_transformers(folders: Path, family: str) -> None:
    ours, theirs = _loaded(folders, family)
    assert (ours.bos_id, ours.eos_id, ours.n_words) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))
    assert frozenset(theirs.all_special_ids) == {*ours.control_texts.values()} & {*theirs.all_special_ids}
    assert ours.encode("a b", bos=True, eos=False) == theirs("a b")["input_ids"]
    assert ours.encode("", bos=True, eos=False) == theirs("")["input_ids"]
    assert (ours.min_tokens(10**6) > 1000) == (family in LENGTHENING)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=examples(60, 150))
@given(text=TEXTS)
def test_ids_and_texts_equal_transformers(folders: Path, family: str, text: str) -> None:
    ours, theirs = _loaded(folders, family)
    ids = ours.encode(text, bos=False, eos=False)
    plain = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if family != "unigram" or not {ours.bos_id, ours.eos_id} & {
        *plain
    }:  # a Unigram model of transformers finds "<s>" itself
        assert ids == plain
        assert ours.encode_parts([TextPart(text[:3], False), TextPart(text[3:], False)]) == plain
    parsed = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode_special(text) == parsed and ours.min_tokens(len(text)) <= min(len(ids), len(parsed))
    assert ours.encode_parts([TextPart(text, True)]) == parsed
    assert {*ours.control_texts.values()}.isdisjoint(ids) or family == "unigram"  # which has <unk>
    for read in (ids, parsed):
        assert ours.decode(read) == theirs.decode(read, skip_special_tokens=True)
        assert ours.decode(read, skip_special_tokens=False) == theirs.decode(read)


@pytest.mark.parametrize("family", ["llama3", "qwen", "smollm"])
@settings(max_examples=examples(60, 150))
@given(ids=st.lists(st.integers(0, 10**6), max_size=12))
def test_any_byte_level_ids_decode_as_transformers(folders: Path, family: str, ids: list[int]) -> None:
    ours, theirs = _loaded(folders, family)
    ids = [each % ours.n_words for each in ids]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    detokenizer = IncrementalDetokenizer(ours)
    assert "".join(detokenizer.push([each]) for each in ids) + detokenizer.flush() == ours.decode(ids)


@pytest.mark.parametrize("family", ["llama3", "qwen", "smollm", "llama2_legacy", "metaspace"])
def test_a_message_never_becomes_a_control_token(folders: Path, family: str) -> None:
    ours, _ = _loaded(folders, family)
    first, *others = (name for name in ours.control_texts if name != "<fill>")
    for hostile in (first, *others, f" {first} ", f"{first}{others[0]}", f"a{first}b"):
        for cut in range(len(hostile) + 1):
            parts = [
                TextPart(f"{others[0]}user\n", True), TextPart(hostile[:cut], False), TextPart(hostile[cut:], False),
                TextPart(others[0], True), TextPart(hostile[:cut], True), TextPart(hostile[cut:], False),
            ]  # fmt: skip
            ids = ours.encode_parts(parts)
            trusted = sum(hostile[:cut].count(name) for name in (first, *others))
            assert sum(ours.is_control(each) for each in ids) == 2 + trusted
            told = ours.decode(ids, skip_special_tokens=False)
            assert "".join(told.split()) == "".join("".join(part.text for part in parts).split())


def test_a_byte_that_the_vocabulary_lacks_never_ends_a_turn(tmp_path: Path) -> None:
    tokenizer, _ = FAMILIES["smollm"]()
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    lost = model["vocab"].pop("\u0104")  # the byte 4, as in the vocabulary of SmolLM2
    model["vocab"] = {token: token_id - (token_id > lost) for token, token_id in model["vocab"].items()}
    model["unk_token"] = "<|endoftext|>"
    model["vocab"]["<|endoftext|>"] = len(model["vocab"])
    content["added_tokens"] = [content["added_tokens"][0] | {"id": model["vocab"]["<|endoftext|>"]}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    ours = load_tokenizer(tmp_path)
    assert ours.decode(ours.encode("a\x04b", bos=False, eos=False)) == "ab"
    assert ours.stop_ids.isdisjoint(ours.encode("a\x04b<|endoftext|>", bos=False, eos=False))
    assert ours.min_tokens(10**6) == 0


def test_tokens_and_stop_ids_of_the_side_files_count(tmp_path: Path) -> None:
    tokenizer = byte_level(None)
    num = tokenizer.get_vocab_size()
    added = {str(num + i): {"content": name, "special": not i} for i, name in enumerate(("<|im_end|>", "<think>"))}
    write_folder(tmp_path, tokenizer, {"added_tokens_decoder": added})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "pad_token": "absent"}')
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{num}, 65]}}')
    ours, theirs = load_tokenizer(tmp_path / "tokenizer.json"), AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.eos_id, ours.bos_id) == (num, None)
    assert ours.stop_ids == {num, 65}
    assert ours.encode_special("<think> a<|im_end|>") == theirs("<think> a<|im_end|>")["input_ids"]
    assert ours.token_bytes(num + 1) == b"<think>" and ours.token_name(num) == ours.control_text(num) == "<|im_end|>"


# Damaged files


def _with_pattern(content: dict[str, Any], pattern: str) -> None:
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}


DAMAGES: list[tuple[str, Any]] = [
    ("has no token for the byte 65", lambda c: c["model"]["vocab"].update({"AAA": c["model"]["vocab"].pop("A")})),
    ("Token `nope` out of vocabulary", lambda c: c["model"]["merges"].insert(0, ["x", "nope"])),
    ("model.dropout is not supported", lambda c: c["model"].update(dropout=0.5)),
    ("has 16389 added tokens, more than 16384", lambda c: c["added_tokens"].extend(
        c["added_tokens"][0] | {"id": c["added_tokens"][-1]["id"] + 1 + i, "content": f"<{i}>"} for i in range(2**14)
    )),
    ("decoder [] is not supported", lambda c: c.update(decoder=None)),
    ("do not give a text back", lambda c: c.update(pre_tokenizer={"type": "Digits", "individual_digits": True})),
    ("damaged, or not supported", lambda c: c.update(pre_tokenizer={"type": "Nonsense"})),
    ("model.type is WordPiece", lambda c: c.update(
        model={"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "#", "max_input_chars_per_word": 9}
        | {"vocab": c["model"]["vocab"]}
    )),
    ("its patterns cannot split 100,000 times 'é'", lambda c: _with_pattern(c, "é*é*é*é*é*x")),
    ("its patterns cannot split 100,000 times 'a'", lambda c: _with_pattern(c, "(a+)+$")),
    ("its patterns cannot split 100,000 times 'a'", lambda c: _with_pattern(c, "a*a*a*a*b")),
    ("takes more than 1 s of processor time", lambda c: _with_pattern(c, r"\s*\s*\s*x")),
]  # fmt: skip


@pytest.mark.parametrize(("message", "damage"), DAMAGES, ids=[message for message, _ in DAMAGES])
def test_damaged_fields_are_refused_by_name(tmp_path: Path, message: str, damage: Any) -> None:
    path = make_family("llama3", tmp_path)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json: .*{re.escape(message)}"):
        load_tokenizer(path) if "1 s" not in message else probe_tokenizer(path, None, max_cpu_s=1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "absent"}, "eos_token is 'absent'"),
        ({"eos_token": 5}, "eos_token must be"),
        ({"eos_token": "\ud800"}, "surrogate"),
        ({"add_bos_token": "yes"}, "add_bos_token"),
        ({"added_tokens_decoder": {}}, None),
        ({"added_tokens_decoder": [3]}, "added_tokens_decoder is not tokens by their ids"),
        ({"added_tokens_decoder": {"x": "y"}}, "added_tokens_decoder is not tokens by their ids"),
        ({"additional_special_tokens": "x"}, "additional_special_tokens"),
        ({"eos_token": None}, "no file beside it has an eos_token"),
    ],
)
def test_damaged_side_files_are_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str | None) -> None:
    tokenizer, told = FAMILIES["llama3"]()
    path = write_folder(tmp_path, tokenizer, told | config)
    if message is None:
        assert load_tokenizer(path).n_words
    else:
        with pytest.raises(TokenizerError, match=re.escape(message)) as caught:
            load_tokenizer(path)
        assert str(tmp_path) in caught.value.message


def test_a_file_that_crashes_the_library_is_refused_by_name(tmp_path: Path) -> None:
    path = make_family("unigram", tmp_path)
    content = json.loads(path.read_text())
    content["model"]["vocab"].append(["a" * 10**6, -1.0])  # the library recurses once for each character
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: the library that reads it ends with SIG"):
        load_tokenizer(path)


def test_a_normalized_control_token_is_found_wherever_it_is_written(tmp_path: Path) -> None:
    path = make_family("llama2_legacy", tmp_path)
    unchanged = load_tokenizer(path)
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        token["normalized"] = True
    path.write_text(json.dumps(content))
    ours = load_tokenizer(path)
    for text in ("ok</s>", "</s>", "a </s><s>b", "<s> ok</s> <s>"):
        expected = unchanged.encode_special(text)
        assert ours.encode_special(text) == expected and ours.eos_id in expected
        assert ours.encode_parts([TextPart(text, True)]) == expected
        assert ours.encode_parts([TextPart(text, True), TextPart("</s>", False)])[: len(expected)] == expected
        assert ours.eos_id not in ours.encode(text, bos=False, eos=False)
