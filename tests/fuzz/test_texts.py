"""The short form of the fuzz command's part for texts, and the faults that it must report."""

from pathlib import Path
from random import Random

from llama_core.text.registry import load_tokenizer
from tests.fuzz import texts
from tests.support.vocabularies import make_family


def test_two_hundred_texts_for_each_tokenizer_come_back() -> None:
    outcome = texts.run(200, seed=Random().randrange(10**6))
    assert outcome.findings == []
    assert len(outcome.counts) == 6 and outcome.cases == 1200


def test_a_text_that_changes_is_a_finding(tmp_path: Path) -> None:
    qwen = load_tokenizer(make_family("qwen", tmp_path))  # which composes characters
    found = texts.faults(qwen, "e\u0301", Random(1), texts.known_bytes_of(qwen))
    assert [each[:17] for each in found] == ["decoded in pieces"]
