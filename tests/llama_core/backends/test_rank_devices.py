"""The GPU that a rank takes of those that its process sees, without a GPU."""

import atexit
from typing import Any

import pytest
import torch
import torch.distributed as dist

from llama_core.backends.parallel import from_torchrun, join, resolve_device
from llama_core.errors import ConfigError


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """As if torch saw them. The devices that are made current, in order."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "")  # so that the test's end restores it
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    return current


def test_a_rank_of_a_group_takes_the_gpu_with_its_index_and_makes_it_current(four_gpus: list[torch.device]) -> None:
    store: Any = None
    joined = join(1, 3, "cuda", store, device_index=2)
    assert joined.device == torch.device("cuda", 2) and four_gpus == [joined.device]
    assert join(0, 3, "auto", store).device == torch.device("cuda", 0)
    assert join(1, 3, "cpu", store, device_index=2).device == torch.device("cpu")


def test_torchrun_s_local_rank_picks_the_gpu(four_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4 GPUs a node, rank 7 is the last of the second node."""
    monkeypatch.setattr(dist, "get_rank", lambda: 7)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(atexit, "register", lambda function: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    group = from_torchrun("cuda")
    assert (group.rank, group.device) == (7, torch.device("cuda", 3)) and four_gpus == [group.device]


def test_cuda_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto", 1) == torch.device("cpu")
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        resolve_device("cuda")
