"""Ranks load the same contents or none: between nodes, and after a failure."""

import json
from pathlib import Path
from typing import Any

import pytest

from llama_core.backends.parallel import Parallel, alone
from llama_core.backends.runner import ModelRunner
from llama_core.config import EngineConfig
from llama_core.errors import CheckpointChanged, CheckpointError
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


@pytest.mark.parametrize("replaced", ["consolidated.00.pth", "params.json"])
def test_later_ranks_refuse_a_replaced_checkpoint(checkpoint: Path, replaced: str) -> None:
    report = ModelRunner.load(config_of(checkpoint, wants_digest=True), alone("cpu")).report
    known = {"verified": {report.files_id: report.digest}, "expected": report.digest}
    if replaced == "params.json":
        (checkpoint / replaced).write_text(json.dumps(WIDE | {"norm_eps": 1e-6}))
    else:
        write(checkpoint, split(random_weights(WIDE, seed=1), 2))
    config = config_of(checkpoint, wants_digest=True, **known)
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

    monkeypatch.setattr("llama_core.weights.meta.MetaWeights.verify_checksums", change_and_verify)
    with pytest.raises(CheckpointError, match="changed while they were loaded"):
        ModelRunner.load(config_of(checkpoint, wants_digest=wants_digest), alone("cpu"))
