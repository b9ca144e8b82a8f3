"""The short form of the fuzz command's part for files, and the findings that its workers must report."""

from pathlib import Path
from random import Random

import pytest

from llama_core.text.registry import load_tokenizer
from llama_core.weights import hf as hf_weights
from llama_core.weights.meta import MetaWeights
from tests.fuzz import file_worker, files, hf_damage
from tests.fuzz.damage import put_demo


def test_two_hundred_damaged_files_are_refused_by_name_or_load_correctly() -> None:
    outcome = files.run(200, seed=Random().randrange(10**6))
    assert outcome.findings == []
    assert outcome.counts["checkpoint: CheckpointError"] > 10 and outcome.counts["tokenizer: TokenizerError"] > 20


def test_damaged_gguf_files_are_refused_by_name_or_load_correctly() -> None:
    outcome = files.run(60, Random().randrange(10**6), {"gguf": 1})
    assert outcome.findings == [] and outcome.counts["gguf: CheckpointError"] > 20


def test_damaged_hugging_face_folders_are_refused_by_name_or_load_correctly() -> None:
    outcome = files.run(120, Random().randrange(10**6), {"safetensors": 2, "config": 1})
    assert outcome.findings == []
    assert outcome.counts["safetensors: CheckpointError"] > 20 and outcome.counts["config: ConfigError"] > 10


def test_damaged_tokenizers_are_refused_by_name_or_encode_and_stream() -> None:
    outcome = files.run(36, 5, {"tokenizer_json": 2, "gguf_vocabulary": 1})
    assert outcome.findings == []
    assert outcome.counts["tokenizer_json: TokenizerError"] > 10
    assert outcome.counts["gguf_vocabulary: TokenizerError"] > 5


def test_weights_other_than_the_safetensors_librarys_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_damage.put_folder(tmp_path)
    assert file_worker.use_folder(tmp_path / file_worker.FOLDER, is_config=False) is None
    monkeypatch.setattr(hf_weights, "interleaved", lambda rows, head_dim: rows)
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


def test_a_damaged_weight_that_is_loaded_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_demo(tmp_path)
    shard = tmp_path / "consolidated.01.pth"
    content = bytearray(shard.read_bytes())
    content[len(content) // 4] ^= 1
    shard.write_bytes(content)
    vocab_size = load_tokenizer(file_worker.DEMO / "tokenizer.model").n_words
    undamaged = file_worker.load_checkpoint(file_worker.DEMO, vocab_size)

    def judged() -> tuple[str, str | None]:
        return file_worker.judge("checkpoint", tmp_path, False, vocab_size, undamaged)

    assert judged() == ("CheckpointError", None)
    monkeypatch.setattr(MetaWeights, "verify_checksums", lambda self, rank, world_size: None)
    assert judged() == ("loaded", "damaged weights were loaded")
