"""Normalizers and pre-tokenizers that take too long, or make a text too long, are refused by the name of the field."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from llama_core.errors import TokenizerError
from llama_core.text.charsmap import check_charsmap
from llama_core.text.gguf_pretokenizers import PRE_TOKENIZERS
from llama_core.text.hugging_face_steps import check_steps, expression_problem
from llama_core.text.registry import load_tokenizer
from tests.support.full_runs import with_full_ones
from tests.support.vocabularies import LLAMA3_SPLIT, QWEN_SPLIT, make_family, precompiled, write_folder

TABLE = "C5\t41 30A\nFB01\t66 69\n"


def _replace(given: Any, put: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": given, "content": put}


def test_the_expressions_of_known_models_are_accepted() -> None:
    for pattern in {each for known in PRE_TOKENIZERS.values() for each in known.patterns} | {LLAMA3_SPLIT, QWEN_SPLIT}:
        assert expression_problem(pattern) is None, pattern
    for pattern in (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}]+(?i:'s|'t)?",
        r" {2,}",
        r"\x{2581}+",
        r"(?:[^a-z&&[^b]]x)+?",
    ):
        assert expression_problem(pattern) is None, pattern


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|aa)+$", "(?:x{9})*", "((a{99}){99}){99}", "a{99999}", "a+*", r"(\w+\s?)*$"]
)
def test_expressions_with_exponentially_many_ways_are_refused(pattern: str) -> None:
    assert expression_problem(pattern) is not None


@pytest.mark.parametrize(
    "pattern", with_full_ones(["a*a*a*a*b", r"\s*\s*\s*x", "a?" * 40 + "a" * 40], in_each_run=["a?" * 40 + "a" * 40])
)
def test_an_expression_that_takes_long_on_some_text_stops_the_start(tmp_path: Path, pattern: str) -> None:
    path = make_family("llama3", tmp_path)
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: "):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("normalizer", "message"),
    [
        (_replace({"String": ""}, "x"), "must have 1 to"),
        (_replace({"String": "a"}, "b" * 10**6), "times longer"),
        ({"type": "Sequence", "normalizers": [_replace({"String": "a"}, "aa")] * 7}, "times longer"),
        (_replace({"Regex": "x*"}, "y" * 64), "times longer"),
        ({"type": "Prepend", "prepend": "x" * 65}, "times longer"),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}] * 65}, "more than 64 steps"),
        ({"type": "Sequence"}, "without normalizers"),
        ({"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "precompiled_charsmap is no table"),
    ],
)
def test_normalizers_beyond_their_bounds_are_refused_by_name(normalizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^normalizer.*{message}"):
        check_steps({"normalizer": normalizer})


def test_a_sound_table_of_characters_loads_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    tokenizer, config = precompiled(TABLE)
    path = write_folder(tmp_path, tokenizer, config)
    loaded = load_tokenizer(path)
    assert loaded.encode("\ufb01", bos=False, eos=False) == loaded.encode("fi", bos=False, eos=False)
    encoded = json.loads(path.read_text())["normalizer"]["normalizers"][0]["precompiled_charsmap"]
    table = base64.b64decode(encoded)
    size = int.from_bytes(table[:4], "little")
    for damaged in (table[:-1], table[: size // 2], table[: 4 + size], table[: 4 + size] + b"x" * 500 + b"\0"):
        with pytest.raises(ValueError, match="precompiled_charsmap"):
            check_charsmap(base64.b64encode(damaged).decode())


def test_a_unigram_token_of_a_million_characters_is_refused(tmp_path: Path) -> None:
    path = make_family("unigram", tmp_path)
    content = json.loads(path.read_text())
    content["model"]["vocab"].append(["a" * 10**6, -1.0])
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: model\.vocab has a token of 1000000 characters"):
        load_tokenizer(path)
