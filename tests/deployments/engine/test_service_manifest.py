"""SHA256SUMS in a server: read before any rank exists, sent to the ranks, and kept for their replacements."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.driver.group_info import GroupInfo
from deployments.args import ServerArgs
from deployments.engine.service import LlamaService
from llama_core.errors import CheckpointError
from llama_core.files.digest import CheckpointDigest
from llama_core.files.manifest import FILE_NAME
from tests.conftest import GOLDEN
from tests.deployments.engine.test_context import Groups
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool, until


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    copy = shutil.copytree(GOLDEN / "mp2", tmp_path / "mp2")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(copy.iterdir())]
    (copy / FILE_NAME).write_text("".join(lines))
    return copy


def args(checkpoint: Path, **changes: Any) -> ServerArgs:
    return ServerArgs(ckpt_dir=str(checkpoint), max_seq_len=64, max_batch_size=4, **changes)


def no_group() -> FakeGroup:
    raise AssertionError("a rank was started")


def test_the_ranks_get_the_manifest(checkpoint: Path) -> None:
    manifest = LlamaService(args(checkpoint), FakeGroupPool(no_group)).config.manifest
    assert manifest is not None and manifest.path == str(checkpoint / FILE_NAME)
    assert len(manifest.digests) == 4
    (checkpoint / FILE_NAME).unlink()
    assert LlamaService(args(checkpoint), FakeGroupPool(no_group)).config.manifest is None


@pytest.mark.parametrize("name", ["tokenizer.model", "params.json"])
def test_files_that_the_replica_parses_are_verified_first(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=rf"{name}: its SHA-256 is"):
        LlamaService(args(checkpoint), FakeGroupPool(no_group))


def test_a_shard_without_an_entry_stops_the_start_before_any_rank_exists(checkpoint: Path) -> None:
    text = (checkpoint / FILE_NAME).read_text()
    (checkpoint / FILE_NAME).write_text(text.replace("consolidated.01.pth", "consolidated.01.bak"))
    with pytest.raises(CheckpointError, match=r"consolidated\.01\.pth: .* has no entry for it"):
        LlamaService(args(checkpoint), FakeGroupPool(no_group))


def test_a_configured_manifest_must_exist(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SHA256_MANIFEST", str(tmp_path / "trusted"))
    with pytest.raises(CheckpointError, match="trusted: cannot be read") as caught:
        LlamaService(args(checkpoint), FakeGroupPool(no_group))
    assert caught.value.param == "sha256_manifest"
    (checkpoint / FILE_NAME).rename(tmp_path / "trusted")
    assert LlamaService(args(checkpoint), FakeGroupPool(no_group)).config.manifest is not None


class Loaded:
    """The part of a rank's report that these tests need."""

    files_id = 4711
    digest = CheckpointDigest((("params.json", "0" * 64),))

    @property
    def load(self) -> "Loaded":
        return self


class Group(FakeGroup):
    async def start(self) -> GroupInfo:
        info = await super().start()
        return GroupInfo(info.epoch, info.num_blocks, (Loaded(), Loaded()))  # type: ignore[arg-type]


async def test_replacing_ranks_know_which_files_were_verified(checkpoint: Path) -> None:
    groups = Groups(Group)
    service = LlamaService(args(checkpoint), groups)
    await service.start()
    groups.made[0].fail()
    await until(lambda: len(groups.configs) == 2)
    first, second = groups.configs
    assert first.manifest is not None and first.manifest == second.manifest
    assert (first.verified, first.expected) == ({}, None)
    assert (second.verified, second.expected) == ({4711: Loaded.digest}, Loaded.digest)
    await service.stop()
