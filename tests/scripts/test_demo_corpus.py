"""The corpus of the demo model (scripts/demo). Nothing here trains."""

import importlib
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "demo"


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
