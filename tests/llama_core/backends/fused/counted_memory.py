"""The fused backend on torch's meta device, with Triton's kernels left out, and the bytes of all its tensors counted.

Tensors have sizes and no values, so that models of any size fit. All allocations are those of a GPU, because they do not depend
on values; the rounding of the allocator, workspaces of libraries and the context of the device are not seen. Addresses begin
at 0 in each storage, so tensors have the alignment of a GPU, whose allocations begin at multiples of 512 bytes.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch
from weakref import WeakSet, finalize

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llama_core.backends.backend_choice import matrix_types
from llama_core.backends.fused.backend import FusedBackend
from llama_core.backends.fused.buffers import DeviceSlots
from llama_core.backends.fused.device import StepDevice, Work
from llama_core.backends.fused.model import FusedTransformer
from llama_core.backends.parallel import Parallel
from llama_core.config import EngineConfig
from llama_core.model.config import ModelConfig
from tests.support.plans import plan_of

META = torch.device("meta")
Key = tuple[str, str, str]  # the kernel, what Triton knows of its arguments, and its options


class LiveBytes(TorchDispatchMode):
    """now: bytes of the tensors on the meta device that live, and were made in this mode. peak: the most since `restart`.
    num_operations: of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.num_operations = 0
        self._seen: WeakSet[Any] = WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.num_operations += 1
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.device == META:
                self._note(each.untyped_storage())
        return result

    def restart(self) -> int:
        """Forget the peak. Returns what lives now."""
        self.peak = self.now
        return self.now

    def _note(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size


@dataclass
class CountingDevice(StepDevice):
    """pool: the most bytes that a captured work has at once: graphs share their memory. eager: those of other works."""

    live: LiveBytes
    pool: int = 0
    eager: int = 0
    captures: bool = True
    torch_device: torch.device = field(default=META)

    def queue(self, work: Work) -> None:
        self.eager = max(self.eager, self.peak_of(work))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        pass

    def warm_up(self, works: list[Work]) -> None:
        pass

    def capture(self, work: Work) -> Work:
        self.pool = max(self.pool, self.peak_of(work))
        return lambda: None

    def peak_of(self, work: Callable[[], object]) -> int:
        before = self.live.restart()
        work()
        assert self.live.now == before, "a work leaves no tensors behind"
        return self.live.peak - before


@contextmanager
def without_kernels() -> Iterator[None]:
    """Triton's launches, and collectives, do nothing."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from llama_core.backends.weight_formats import matrices
    from llama_core.backends.weight_formats.kernels import multiply

    def launch(kernel: object, grid: object) -> Callable[..., None]:
        return lambda *args, **constants: None

    with ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(patch.object(kind, "__getitem__", launch))
        stack.enter_context(patch.object(matrices, "triton_product", lambda device_type: multiply))
        for name in ("all_reduce", "all_gather_into_tensor", "broadcast"):
            stack.enter_context(patch.object(dist, name, lambda *args, **options: None))
        yield


@contextmanager
def recorded_keys(sm: int = 90) -> Iterator[set[Key]]:
    """The keys by which Triton compiles variants for a GPU, of all kernels that are launched inside. None is compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend, keys = make_backend(GPUTarget("cuda", sm, 32)), set[Key]()

    @cache
    def binder(kernel: Any) -> Any:
        return create_function_from_signature(kernel.signature, kernel.params, backend)

    def launch(kernel: Any, grid: object) -> Callable[..., None]:
        def note(*args: object, **options: object) -> None:
            _, specialization, others = binder(kernel)(*args, **options)
            keys.add((kernel.fn.__name__, str(specialization), str(sorted(others.items()))))

        return note

    with without_kernels(), patch.object(JITFunction, "__getitem__", launch):
        yield keys


def meta_backend(
    model: ModelConfig, num_ranks: int, device: StepDevice, **fields: Any
) -> tuple[FusedBackend, DeviceSlots, EngineConfig]:
    """Rank 0's backend in bfloat16 without weights or cache. Inside `without_kernels`."""
    from llama_core.backends.fused.kernels import TritonOps
    from llama_core.backends.fused.product_kernels import of_few_rows

    fields = {"max_seq_len": 4096, "max_batch_size": 64, "max_step_tokens": 2048} | fields
    config, parallel = EngineConfig("", model.vocab_size, **fields), Parallel(0, num_ranks, META)
    plan = plan_of(model, lambda name: "dense", config.quantization, "bfloat16", num_ranks)
    ops = TritonOps(batch_invariant=config.batch_invariant, fuses=of_few_rows)
    common = model, parallel, config.max_seq_len, torch.bfloat16, ops, matrix_types(plan), ()
    transformer = FusedTransformer(*common, batch_invariant=config.batch_invariant)
    slots = DeviceSlots(config, META)
    return FusedBackend(config, transformer, slots, device), slots, config
