"""Stop ids and recommended sampling parameters of generation_config.json and config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_core.errors import CheckpointError
from llama_core.files.generation_config import RecommendedSampling, read_recommended_sampling, read_stop_ids


def write(folder: Path, name: str = "generation_config.json", **fields: Any) -> None:
    (folder / name).write_text(json.dumps(fields))


def test_stop_ids_of_both_files_are_joined(tmp_path: Path) -> None:
    assert read_stop_ids(tmp_path) == frozenset() and read_recommended_sampling(tmp_path) == RecommendedSampling()
    write(tmp_path, eos_token_id=[7, 9], temperature=0.7, top_p=0.8, top_k=20)
    write(tmp_path, "config.json", eos_token_id=5)
    assert read_stop_ids(tmp_path) == {5, 7, 9}
    assert read_recommended_sampling(tmp_path) == RecommendedSampling(0.7, 0.8, 20)


def test_a_model_that_does_not_sample_is_greedy(tmp_path: Path) -> None:
    write(tmp_path, do_sample=False, temperature=0.7, top_p=0.8)
    assert read_recommended_sampling(tmp_path) == RecommendedSampling(0.0)


def test_minus_one_means_none(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[-1, 4], top_k=-1)
    write(tmp_path, "config.json", eos_token_id=-1)
    assert read_stop_ids(tmp_path) == {4} and read_recommended_sampling(tmp_path).top_k == 0


@pytest.mark.parametrize(
    "fields",
    [{"eos_token_id": "2"}, {"eos_token_id": [True]}, {"eos_token_id": 2**31}, {"eos_token_id": [[1]]},
     {"temperature": "1"}, {"temperature": float("nan")}, {"top_p": 2}, {"top_k": 2**31}, {"top_k": True}],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_file_and_field(fields: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, **fields)
    read = read_stop_ids if "eos_token_id" in fields else read_recommended_sampling
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {next(iter(fields))}"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b" " * 2**23])
def test_a_damaged_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_stop_ids(tmp_path)
