"""The short form of the fuzz command's part for files, and the findings that its workers must report."""

from pathlib import Path
from random import Random

import pytest

from llama_core.weights import hf as hf_weights
from tests.fuzz import file_worker, files, hf_damage


@pytest.mark.parametrize(
    ("cases", "seed", "shares", "least_refused"),
    [
        (200, None, {"checkpoint": 2, "params": 3, "tokenizer": 5}, {"checkpoint": 10, "tokenizer": 20}),
        (60, None, {"gguf": 1}, {"gguf": 20}),
        (120, None, {"safetensors": 2, "config": 1}, {"safetensors": 20, "config": 10}),
        (36, 5, {"tokenizer_json": 2, "gguf_vocabulary": 1}, {"tokenizer_json": 10, "gguf_vocabulary": 5}),
    ],
    ids=["Meta", "GGUF", "Hugging Face", "tokenizers"],
)
def test_damaged_files_are_refused_by_name_or_load_correctly(
    cases: int, seed: int | None, shares: dict[str, int], least_refused: dict[str, int]
) -> None:
    outcome = files.run(cases, Random().randrange(10**6) if seed is None else seed, shares)
    assert outcome.findings == []
    for kind, count in least_refused.items():
        assert sum(outcome.counts[f"{kind}: {name}Error"] for name in ("Checkpoint", "Config", "Tokenizer")) > count


def test_weights_other_than_the_safetensors_librarys_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_damage.put_folder(tmp_path)
    assert file_worker.use_folder(tmp_path / file_worker.FOLDER, is_config=False) is None
    monkeypatch.setattr(hf_weights, "interleaved", lambda rows, head_dim, rotated: rows)
    assert "was loaded with other values" in (
        file_worker.use_folder(tmp_path / file_worker.FOLDER, is_config=False) or ""
    )


def test_a_pickle_that_runs_code_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_worker, "_is_loading", True)
    monkeypatch.setattr(file_worker, "_deeds", deeds := list[str]())
    file_worker._audit("os.system", ("true",))
    file_worker._audit("open", ("sprung", "w", 0))
    file_worker._audit("open", ("params.json", "rb", 0))
    file_worker._audit("os.listdir", (".",))
    assert [deed.split()[0] for deed in deeds] == ["os.system", "open"]
