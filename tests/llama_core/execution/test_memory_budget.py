"""A rank refuses weights that do not fit before it allocates memory for them."""

from pathlib import Path

import pytest
import torch

from llama_core import host_memory
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.execution import memory_budget as memory
from llama_core.execution.parallel import Parallel, alone
from llama_core.execution.runner import ModelRunner
from tests.conftest import GOLDEN


def test_weights_that_do_not_fit_are_refused_with_need_and_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(ckpt_dir=str(GOLDEN / "mp2"), vocab_size=640, max_seq_len=64, max_batch_size=2, device="cpu")
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 100_000)
    with pytest.raises(
        ConfigError, match=r"1 of 1 ranks here need [\d,]+ bytes each, 100,000 are free: use more ranks"
    ):
        ModelRunner.load(config, alone("cpu"))


def test_ranks_that_share_a_host_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 150)
    monkeypatch.setattr(memory, "smallest", lambda parallel, value: value)
    parallel = Parallel(0, 2, torch.device("cpu"))
    monkeypatch.setattr(memory, "ranks_with", lambda parallel, value: [0])
    memory.check_weights_fit(100, parallel)
    monkeypatch.setattr(memory, "ranks_with", lambda parallel, value: [0, 1])
    with pytest.raises(ConfigError, match="2 of 2 ranks here need 100 bytes each, 150 are free"):
        memory.check_weights_fit(100, parallel)


@pytest.mark.parametrize("version", [0, 1], ids=["cgroup v2", "v1"])
def test_a_containers_limit_counts_and_its_file_cache_is_free_memory(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, limit, used, (inactive, active) = host_memory.CGROUPS[version]
    monkeypatch.setattr(host_memory, "CGROUPS", ((str(tmp_path), limit, used, (inactive, active)),))
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / used).write_text("900000\n")
    (tmp_path / "memory.stat").write_text(f"anon 100000\n{inactive} 500000\n{active} 300000\n")
    assert host_memory.available_host_bytes() == 900_000
    (tmp_path / limit).write_text("max\n")
    assert host_memory.available_host_bytes() > 1_000_000
