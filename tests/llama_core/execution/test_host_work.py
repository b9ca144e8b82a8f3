"""What the host does for a step of the fused backend, and what it refuses, without a GPU."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.execution.fused.device import choose_ops
from llama_core.execution.runner import ModelRunner
from tests.programs.gpu_host_time import CONTEXT, DECODES, admit, host_work, stub_backend


def test_a_step_takes_few_calls_of_the_device_and_few_operations_of_torch() -> None:
    """Decodes: a copy in, two graphs, a copy out. A prompt's tokens travel in the same copy; one call more writes them."""
    backend, slots, device = stub_backend()
    for slot in range(DECODES):
        admit(slots, slot, CONTEXT)
    calls, operations = host_work(backend, slots, device, has_prompt=False)
    assert calls == 4 and operations <= 6
    calls, operations = host_work(backend, slots, device, has_prompt=True)
    assert calls == 5 and operations <= 16


def test_a_gpu_on_which_triton_does_not_work_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch, attention would gather block tables for which no memory is planned."""
    kernels: Any = ModuleType("llama_core.execution.fused.kernels")

    def fails(**options: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    kernels.TritonOps = fails
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    with pytest.raises(ConfigError, match=r"Failed to find C compiler.*install a C compiler and Python's headers"):
        choose_ops("fused", torch.device("cuda"))


def test_the_memory_of_a_gpu_is_counted_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count takes 0.1 ms, which is a share of a decode step."""
    num_counts = 0

    def memory_allocated() -> int:
        nonlocal num_counts
        num_counts += 1
        return 1000 + num_counts

    monkeypatch.setattr(torch.cuda, "memory_allocated", memory_allocated)
    runner: Any = ModelRunner.__new__(ModelRunner)
    runner.config = EngineConfig("", 100, 64, 4)
    runner.parallel = type("OnGpu", (), {"device": torch.device("cuda")})
    runner._num_results = runner._device_bytes = 0
    found = [runner._allocated_bytes() for _ in range(130)]
    assert num_counts == 3 and found[0] == found[63] == 1001 and found[64] == 1002 and found[129] == 1003
