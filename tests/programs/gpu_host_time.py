"""The host's time for a step on a GPU, without one: `python -m tests.programs.gpu_host_time`.

Tensors have shapes and no values (torch's meta device), and a graph's replay does nothing. What remains is Python, NumPy and
the calls of the device, which are counted. The shape is Llama 2 7B's but for smaller matrices.
"""

import statistics
import time
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core.config import EngineConfig
from llama_core.execution.fused import backend as fused
from llama_core.execution.fused.buffers import DeviceSlots
from llama_core.execution.fused.device import StepDevice, Work
from llama_core.execution.fused.model import FusedTransformer
from llama_core.execution.fused.ops import TorchOps
from llama_core.execution.parallel import Parallel
from llama_core.execution.weight_formats.format import TorchMatrixType
from llama_core.execution.weight_formats.matrices import find_weight_format
from llama_core.model_config import ModelConfig
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit

META = torch.device("meta")
DECODES, CONTEXT, PROMPT = 32, 300, 2048
ROUNDS = 100


class _StubDevice(StepDevice):
    """Counts what the host asks for, and does none of it."""

    captures = True

    def __init__(self) -> None:
        self.torch_device = META
        self.num_calls = 0

    def queue(self, work: Work) -> None:
        self.num_calls += 1
        work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_calls += 1

    def warm_up(self, works: list[Work]) -> None:
        pass

    def capture(self, work: Work) -> Work:
        return lambda: self.queue(lambda: None)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def matrix_type(name: str) -> TorchMatrixType:
    return find_weight_format("bfloat16").torch_matrix


def stub_backend() -> tuple[fused.FusedBackend, DeviceSlots, _StubDevice]:
    config = EngineConfig("", 32_000, 4096, 64, max_step_tokens=PROMPT + DECODES)
    model_config = ModelConfig(
        dim=256, n_layers=32, n_heads=32, n_kv_heads=32, vocab_size=32_000, norm_eps=1e-5, hidden_dim=512, head_dim=8
    )
    parallel, device = Parallel(0, 1, META), _StubDevice()
    with torch.inference_mode():
        ops = TorchOps()
        model = FusedTransformer(model_config, parallel, 4096, torch.bfloat16, ops, matrix_type, [])
    slots = DeviceSlots(config, META, spare=1)
    backend = fused.FusedBackend(config, model, parallel, slots, TorchOps(), device)
    with patch.object(fused, "smallest", lambda parallel, value: value):
        backend.allocate_cache(600)
    return backend, slots, device


def admit(slots: DeviceSlots, slot: int, length: int) -> None:
    blocks = list(range(-(-length // 16) + 1))
    slots.admit(SlotInit(slot, list(range(1, length + 1)), blocks, SamplingParams(0.7, seed=1)))


@torch.inference_mode()
def step(backend: fused.FusedBackend, slots: DeviceSlots, *, has_prompt: bool) -> float:
    """Queue decodes, and a prompt beside them. Seconds."""
    rows = [Row(slot, CONTEXT, 1, True) for slot in range(DECODES)]
    begin = time.perf_counter()
    if has_prompt:
        admit(slots, DECODES, PROMPT)
        rows.append(Row(DECODES, 0, PROMPT, True))
    backend.start(rows, keep_logits=False)
    return time.perf_counter() - begin


def host_work(
    backend: fused.FusedBackend, slots: DeviceSlots, device: _StubDevice, *, has_prompt: bool
) -> tuple[int, int]:
    """Calls of the device and torch operations of a step like those before it."""
    for _ in range(5):
        step(backend, slots, has_prompt=has_prompt)
    before = device.num_calls
    with _Counter() as counter:
        step(backend, slots, has_prompt=has_prompt)
    return device.num_calls - before, counter.count


def main() -> None:
    backend, slots, device = stub_backend()
    for slot in range(DECODES):
        admit(slots, slot, CONTEXT)
    for words, has_prompt in (
        (f"{DECODES} decodes", False),
        (f"{DECODES} decodes and a prompt of {PROMPT} tokens", True),
    ):
        calls, operations = host_work(backend, slots, device, has_prompt=has_prompt)
        median = statistics.median(step(backend, slots, has_prompt=has_prompt) for _ in range(ROUNDS)) * 1e6
        print(f"{words}: {median:.0f} us, {calls} calls of the device, {operations} torch operations")


if __name__ == "__main__":
    main()
