"""What the fused backend asks of its device: one queue of work, copies, events and graphs. `CudaDevice` implements it.

While the backend serves, it calls CUDA in one other place only: torch reads prompt logprobs from logits for which `compute` has
waited. At the start, weights (`weights/uploads.py`) and the budget of memory (`memory_budget.py`) call CUDA themselves.

`StepDevice` computes at once. The tests have a third implementation, which runs queued work as late as its
ordering allows, so that a missing wait gives wrong results (`tests/support/simulated_device.py`).
"""

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from llama_core.backends.fused.ops import TorchOps
from llama_core.errors import ConfigError

log = logging.getLogger(__name__)

# What a rank on a GPU imports beside the runner. A standby process does so before it is needed. No import makes a CUDA context,
# which would take memory beside the rank that serves.
_KERNELS: Final = (
    "llama_core.backends.fused.kernels",
    "llama_core.backends.weight_formats.kernels",
    "llama_core.backends.weight_formats.invariant_kernels",
)
Work = Callable[[], object]


class Event(Protocol):
    """A point in the queue."""

    def is_reached(self) -> bool: ...

    def wait(self) -> None:
        """Block the calling thread, which may be any, until all work before this point is done."""


class _Reached:
    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class StepDevice:
    """Runs work in the order in which it is queued: here at once, on a CPU or any other device, and copies wait. The host waits
    only in `Event.wait`, `compute` and `synchronize`.

    torch_device: where tensors are. captures: whether `capture` is worth its memory.
    """

    captures = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def page_locked(self, *shape: int) -> torch.Tensor:
        """int64 zeros in page-locked host memory. A copy from or to it runs at its turn in the queue, not when it is queued."""
        return torch.zeros(shape, dtype=torch.int64)

    def queue(self, work: Work) -> None:
        """Queue work that reads and writes tensors of the device only."""
        work()

    def compute(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Queue work and block the host until it is done. Any thread may read the result."""
        result = work()
        self.synchronize()
        return result

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between a page-locked tensor and one of the device."""
        target.copy_(source)

    def record(self) -> Event:
        """The point after all work that was queued so far."""
        return _Reached()

    def warm_up(self, works: list[Work]) -> None:
        """Run all work once, before it is captured: this compiles kernels and opens NCCL's channels."""
        for work in works:
            work()

    def capture(self, work: Work) -> Work:
        """What queues `work` as a graph. Runs no part of it now. Graphs share the memory of their intermediate tensors. Raises
        RuntimeError where the work cannot be captured."""
        raise RuntimeError("this device captures nothing")

    def synchronize(self) -> None:
        """Block the host until all work is done. Not beside other threads' captures."""


class _CudaEvent:
    def __init__(self, index: int) -> None:
        self._index = index
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.set_device(self._index)  # a new thread has the first GPU, and a context there would take its memory
        self._event.synchronize()


class CudaDevice(StepDevice):
    """The current stream of one CUDA device."""

    captures = True

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self._index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        self._pool: Any = None
        self._stream: Any = None

    def page_locked(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        return _CudaEvent(self._index)

    def warm_up(self, works: list[Work]) -> None:
        # On a separate stream, as torch requires.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            super().warm_up(works)
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        restored = torch.cuda.stream(torch.cuda.current_stream())  # also after a failed capture
        # thread_local: other threads' calls do not end the capture, such as NCCL's watchdog's queries of its events, and copies
        # and allocations of the thread that loads weights. torch gives the graphs' memory to the captured stream alone.
        captured = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with restored, captured:
            work()
        return graph.replay

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def choose_ops(kind: str, device: torch.device, *, batch_invariant: bool = False) -> tuple[TorchOps, StepDevice]:
    """kind "fused": Triton's kernels and CUDA graphs on a GPU. Else, and on a CPU, the operations in torch, one by one. Raises
    ConfigError where Triton does not work, and where the operations in torch are to be batch-invariant."""
    if device.type != "cuda" or kind == "torch":
        if batch_invariant:
            raise ConfigError(
                "batch_invariant needs a GPU with the fused backend; on a CPU the native backend is always batch-invariant",
                param="batch_invariant",
            )
        if device.type == "cuda":
            # It makes a plan for each new shape, in up to half a second, and each chunk of a prompt has its own.
            torch.backends.cuda.enable_cudnn_sdp(False)
        return TorchOps(), StepDevice(device)
    try:
        from llama_core.backends.fused.kernels import TritonOps
        from llama_core.backends.fused.product_kernels import of_few_rows

        ops = TritonOps(batch_invariant=batch_invariant, fuses=of_few_rows)
        ops.gate(torch.zeros((1, 2), device=device))  # builds Triton's launcher, which needs a C compiler
    except Exception as error:  # any error of Triton, the compiler or the file system
        # In torch, attention would gather whole block tables, for which no memory is planned.
        raise ConfigError(
            f"Triton does not work here ({error}): install a C compiler and Python's headers, or give backend: torch",
            param="backend",
        ) from error
    return ops, CudaDevice(device)


def import_kernels() -> None:
    """Import Triton and all kernels, and compute what their first launches need: the hash of Triton itself, half a gigabyte of
    code, and those of the kernels' sources. Without Triton, loading says what is wrong."""
    try:
        for name in _KERNELS:
            importlib.import_module(name)
        _compute_keys()
    except Exception as error:  # any error of an installation
        log.info("kernels are not imported in advance: %s", error)


def _compute_keys() -> None:
    """Compute the hashes, which Triton keeps for the process. Needs no device."""
    from triton.runtime.cache import triton_key
    from triton.runtime.jit import JITFunction

    triton_key()
    # Kernels of all loaded modules, because those above import others.
    kernels = {
        id(value): value
        for name, module in list(sys.modules.items())
        if name.startswith("llama_core.")
        for value in vars(module).values()
        if isinstance(value, JITFunction)
    }
    for kernel in kernels.values():
        _ = kernel.cache_key
