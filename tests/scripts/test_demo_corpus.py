"""The corpus and the committed files of the demo model (scripts/demo, demo). Nothing here trains."""

import importlib
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "demo"
DEMO = ROOT / "demo"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of scripts/demo as the scripts do: by its bare name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ("grammar", "facts", "stories", "talk", "corpus")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def test_the_same_seed_gives_the_same_documents_and_another_seed_does_not(demo: Any) -> None:
    stream = demo("corpus").stream
    first = list(islice(stream(7, "train"), 200))
    assert first == list(islice(stream(7, "train"), 200))
    assert first != list(islice(stream(8, "train"), 200))


def test_heldout_documents_never_occur_in_training(demo: Any) -> None:
    stream = demo("corpus").stream
    heldout = {document.text for document in islice(stream(3, "heldout"), 100)}
    training = {document.text for document in islice(stream(3, "train"), 8000)}
    assert not heldout & training


def test_both_shards_together_take_at_most_8_megabytes() -> None:
    assert sum((DEMO / f"consolidated.{rank:02d}.pth").stat().st_size for rank in range(2)) <= 8_000_000


def test_the_tokenizer_has_the_ids_and_options_of_llama_2() -> None:
    spm = pytest.importorskip("sentencepiece")
    tokenizer = spm.SentencePieceProcessor(model_file=str(DEMO / "tokenizer.model"))
    assert (tokenizer.unk_id(), tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.pad_id()) == (0, 1, 2, -1)
    assert tokenizer.vocab_size() % 8 == 0
    assert len(tokenizer.encode("[INST]")) > 1  # plain text, no control piece
    assert tokenizer.decode(tokenizer.encode("A  b\n 12 你好 [INST]")) == "A  b\n 12 你好 [INST]"
    assert tokenizer.encode("\n", out_type=str)[-1] == "<0x0A>"


def test_the_heldout_text_exists_and_is_short() -> None:
    assert 20_000 <= (DEMO / "heldout.txt").stat().st_size <= 60_000
