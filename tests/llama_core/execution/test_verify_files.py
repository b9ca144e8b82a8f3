"""Ranks load the same contents or none: between nodes, and after a failure."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_core.config import EngineConfig
from llama_core.errors import CheckpointChanged, CheckpointError
from llama_core.execution.parallel import Parallel, alone
from llama_core.execution.runner import ModelRunner
from tests.support.checkpoints import WIDE, random_weights, split, write


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "model", split(random_weights(WIDE), 2))


def config_of(ckpt_dir: str | Path, **fields: Any) -> EngineConfig:
    return EngineConfig(str(ckpt_dir), 640, 32, 2, device="cpu", backend="torch", **fields)


def load_own_copy(parallel: Parallel, copies: list[str], **fields: Any) -> str:
    """Load `copies[rank]`, as ranks on different nodes do. The error that this raises, or ""."""
    try:
        ModelRunner.load(config_of(copies[parallel.rank], **fields), parallel)
    except CheckpointError as error:
        return error.message
    return ""


def test_ranks_with_different_checkpoints_refuse_to_load(checkpoint: Path, tmp_path: Path, ranks: Any) -> None:
    """A stale copy under the same path on another node has the same shapes and whole shards."""
    stale = write(tmp_path / "stale", split(random_weights(WIDE, seed=1), 2))
    messages = ranks(2).call(load_own_copy, [str(checkpoint), str(stale)])
    assert all("the nodes hold different checkpoints" in message for message in messages), messages
    for name in ("consolidated.00.pth", "rank 1 on ", "rank 0 on "):
        assert name in messages[0]


def test_ranks_with_equal_copies_load(checkpoint: Path, tmp_path: Path, ranks: Any) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert ranks(2).call(load_own_copy, [str(checkpoint), str(copy)]) == ["", ""]


def test_copy_with_a_missing_shard_is_named(checkpoint: Path, tmp_path: Path, ranks: Any) -> None:
    other = write(tmp_path / "other", split(random_weights(WIDE), 1))
    messages = ranks(2).call(load_own_copy, [str(checkpoint), str(other)])
    assert "consolidated.00.pth: rank 1" in messages[0], messages


def read_for_digest(parallel: Parallel, ckpt_dir: str, **fields: Any) -> tuple[list[str], Any]:
    """Names of the files that this rank reads to compute the digest while it loads, and what it reports."""
    read: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llama_core.execution.verify_files.sha256_of_each", _noting(read))
        report = ModelRunner.load(config_of(ckpt_dir, wants_digest=True, **fields), parallel).report
    return read, (report.files_id, report.digest)


def _noting(read: list[str]) -> Callable[[list[Path], int], Iterator[str]]:
    from llama_core.checkpoint.digest import sha256_of_each

    def note(files: list[Path], num_threads: int) -> Iterator[str]:
        read.extend(file.name for file in files)
        return sha256_of_each(files, num_threads)

    return note


def test_ranks_of_one_host_hash_each_file_once(checkpoint: Path, ranks: Any) -> None:
    (first, report), (second, other_report) = ranks(2).call(read_for_digest, str(checkpoint))
    assert first and second and report == other_report
    assert sorted(first + second) == ["consolidated.00.pth", "consolidated.01.pth", "params.json"]
    (_, alone_report) = read_for_digest(alone("cpu"), str(checkpoint))
    assert alone_report == report, "the digest does not depend on the number of ranks"


def test_unchanged_files_are_not_hashed_again(checkpoint: Path) -> None:
    _, (files_id, digest) = read_for_digest(alone("cpu"), str(checkpoint))
    known = {"verified": {files_id: digest}, "expected": digest}
    assert read_for_digest(alone("cpu"), str(checkpoint), **known) == ([], (files_id, digest))
    copy = shutil.copytree(checkpoint, checkpoint.parent / "copy")
    read, (_, of_copy) = read_for_digest(alone("cpu"), str(copy), **known)
    assert sorted(read) == ["consolidated.00.pth", "consolidated.01.pth", "params.json"]
    assert of_copy == digest


def test_digest_is_not_computed_where_it_is_not_needed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hashed(*_: object) -> None:
        raise AssertionError("a file was hashed")

    monkeypatch.setattr("llama_core.execution.verify_files.sha256_of_each", hashed)
    assert ModelRunner.load(config_of(checkpoint), alone("cpu")).report.digest is None


@pytest.mark.parametrize("replaced", ["consolidated.00.pth", "params.json"])
def test_later_ranks_refuse_a_replaced_checkpoint(checkpoint: Path, replaced: str) -> None:
    _, (files_id, digest) = read_for_digest(alone("cpu"), str(checkpoint))
    if replaced == "params.json":
        (checkpoint / replaced).write_text(json.dumps(WIDE | {"norm_eps": 1e-6}))
    else:
        write(checkpoint, split(random_weights(WIDE, seed=1), 2))
    config = config_of(checkpoint, wants_digest=True, verified={files_id: digest}, expected=digest)
    with pytest.raises(CheckpointChanged) as caught:
        ModelRunner.load(config, alone("cpu"))
    assert f"{checkpoint}/{replaced}: rank 0 on " in caught.value.message
    assert "replaced while it was served" in caught.value.message and caught.value.code == "checkpoint_changed"


@pytest.mark.parametrize("wants_digest", [True, False])
def test_files_that_change_during_the_load_are_noticed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, wants_digest: bool
) -> None:
    def change_and_verify(*_: object) -> None:
        (checkpoint / "params.json").write_text((checkpoint / "params.json").read_text() + "\n")

    monkeypatch.setattr("llama_core.checkpoint.meta_weights.MetaWeights.verify_checksums", change_and_verify)
    with pytest.raises(CheckpointError, match="changed while they were loaded"):
        ModelRunner.load(config_of(checkpoint, wants_digest=wants_digest), alone("cpu"))
