"""A device for the fused backend that runs queued work late, so that a missing wait gives wrong tokens.

Work waits in a queue until the host waits for an event, or until a random moment before. A graph is a recording of torch
operations and of the tensors that they read and wrote; a replay repeats these operations on these tensors. After a replay its
intermediate tensors hold NaN, because on a GPU all graphs share their memory.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core.backends.fused.adapters import Adapted
from llama_core.backends.fused.device import Work
from llama_core.backends.fused.ops import TorchOps
from llama_core.backends.fused.step_plan import AttentionTiles
from llama_core.backends.kv_cache import KVCache
from llama_core.model.operations import Attend

# Operations that make the host wait for a GPU, or that read memory of the host.
_HOST_ACCESSES = {
    *("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal"),
    *("lift_fresh", "masked_select", "unique", "_unique2"),
}
_NAN_BYTE = 0xFF  # floats of such bytes are NaN


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _place(tensor: torch.Tensor) -> int:
    """The same for all views of the same memory."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class _Operation:
    function: Any
    args: Any
    kwargs: Any
    result: Any


class _Recorder(TorchDispatchMode):
    """Runs operations and records them. Raises RuntimeError for what cannot be part of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _HOST_ACCESSES:
            raise RuntimeError(f"{name} while a graph is captured")
        result = func(*args, **(kwargs or {}))
        self.operations.append(_Operation(func, args, kwargs or {}, result))
        return result


class _Watcher(TorchDispatchMode):
    """Notes collectives in their order, and host accesses."""

    def __init__(self, device: "SimulatedDevice") -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _HOST_ACCESSES:
            self._device.host_accesses.append(name)
        if func.namespace == "c10d":
            self._device.collectives.append((name, [(*tensor.shape, str(tensor.dtype)) for tensor in _tensors(args)]))
        return func(*args, **(kwargs or {}))


class _Graph:
    def __init__(self, device: "SimulatedDevice", operations: list[_Operation]) -> None:
        self._device = device
        self._operations = operations
        # Tensors that came into being while the graph was captured.
        inner: dict[int, torch.UntypedStorage] = {}
        for operation in operations:
            read = {_place(tensor) for tensor in _tensors(operation.args)}
            inner |= {
                _place(made): made.untyped_storage() for made in _tensors(operation.result) if _place(made) not in read
            }
        self._inner = list(inner.values())

    def replay(self) -> None:
        self._device.num_replays += 1
        self._device.queue(self._run)

    def _run(self) -> None:
        for operation in self._operations:
            result = operation.function(*operation.args, **operation.kwargs)
            for old, new in zip(_tensors(operation.result), _tensors(result), strict=True):
                if _place(old) != _place(new):
                    old.copy_(new)
            if isinstance(result, (list, tuple)) and hasattr(result[-1], "wait"):
                result[-1].wait()  # a collective's
        for storage in self._inner:
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(_NAN_BYTE)


class _Event:
    def __init__(self, device: "SimulatedDevice", position: int) -> None:
        self._device = device
        self._position = position

    def is_reached(self) -> bool:
        self._device.advance()
        return self._device.num_done >= self._position

    def wait(self) -> None:
        self._device.count_wait()
        self._device.run_to(self._position)


@dataclass
class SimulatedDevice:
    """eagerness: the probability that the next work in the queue runs whenever the host calls the device; 0 for never.

    One thread, which made the device, queues work; others may wait for events. num_waits: of that thread.
    """

    seed: int = 0
    eagerness: float = 0.0
    captures: bool = True
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    num_done: int = 0
    num_waits: int = 0
    num_copies: int = 0
    num_replays: int = 0
    host_accesses: list[str] = field(default_factory=list)
    collectives: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queue: deque[Work] = deque()
        self._random = random.Random(self.seed)
        self._locked: list[torch.Tensor] = []
        self._thread = threading.get_ident()
        self._lock = threading.RLock()

    def page_locked(self, *shape: int) -> torch.Tensor:
        tensor = torch.zeros(shape, dtype=torch.int64)
        self._locked.append(tensor)
        return tensor

    def queue(self, work: Work) -> None:
        assert threading.get_ident() == self._thread, "one thread queues work"
        with self._lock:
            self._queue.append(work)
        self.advance()

    def compute(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        results: list[torch.Tensor] = []
        self.queue(lambda: results.append(work()))
        self.synchronize()
        return results[0]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        locked = {_place(tensor) for tensor in self._locked}
        ends = [_place(target) in locked, _place(source) in locked]
        assert sorted(ends) == [False, True], "a copy is between page-locked memory and the device"
        self.num_copies += 1
        self.queue(lambda: target.copy_(source))

    def record(self) -> _Event:
        with self._lock:
            return _Event(self, self.num_done + len(self._queue))

    def warm_up(self, works: list[Work]) -> None:
        for work in works:
            self.queue(work)
        self.synchronize()

    def capture(self, work: Work) -> Work:
        self.synchronize()
        with torch.inference_mode(), _Recorder() as recorder:
            work()
        return _Graph(self, recorder.operations).replay

    def synchronize(self) -> None:
        self.count_wait()
        self.run_to(self.num_done + len(self._queue))

    def count_wait(self) -> None:
        self.num_waits += threading.get_ident() == self._thread

    def advance(self) -> None:
        with self._lock:
            while self._queue and self._random.random() < self.eagerness:
                self._run_next()

    def run_to(self, position: int) -> None:
        with self._lock:
            while self.num_done < position:
                self._run_next()

    def _run_next(self) -> None:
        work = self._queue.popleft()
        with torch.inference_mode(), _Watcher(self):
            work()
        self.num_done += 1


class CapturableOps(TorchOps):
    """Attention by tiles as in `TorchOps`, without an access of the host. For small models: it gathers whole block tables."""

    def add_adapters(self, y: torch.Tensor, x: torch.Tensor, adapted: Adapted | None) -> torch.Tensor:
        if adapted is not None:
            a, b, scales = (torch.cat([each[:1] * 0, each]) for each in adapted.adapters.tensors)  # place 0: zeros
            places, outputs = adapted.places, torch.arange(y.shape[1])
            module = torch.zeros_like(outputs)
            for bound in adapted.adapters.bounds[1:-1]:
                module = module + (outputs >= bound)
            shrunk = torch.einsum("ti,tmri->tmr", x, a[places]) * scales[places][..., None]
            y += torch.einsum("tor,tor->to", shrunk[:, module], b[places])
        return y

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        block_tables: torch.Tensor,
        tiles: AttentionTiles,
        how: Attend,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None
        window = how.window
        rows = torch.cat([tiles.decodes, tiles.chunks])
        token = torch.arange(len(q))
        # The tile of each token; tokens of padding are in none.
        is_in = (token[None] >= rows[:, :1]) & (token[None] < rows[:, :1] + rows[:, 1:2])  # [tiles, T]
        begin, _, slots, first, _ = (is_in[..., None] * rows[:, None]).sum(0).unbind(1)
        lengths = torch.where(is_in.any(0), first + token - begin + 1, 1)
        seen = block_tables[slots]
        gathered_keys, gathered_values = (each[seen].flatten(1, 2) for each in cache)
        group = q.shape[1] // cache.keys.shape[2]
        position = torch.arange(gathered_keys.shape[1])
        visible = position < lengths[:, None]
        if window:
            visible &= position >= lengths[:, None] - window
        repeated = gathered_keys.repeat_interleave(group, dim=2)
        scale = q.shape[-1] ** -0.5 if how.scale is None else how.scale
        scores = torch.einsum("thd,tlhd->thl", q, repeated).float() * scale
        weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1).type_as(q)
        seen_values = gathered_values.masked_fill(~visible[..., None, None], 0).repeat_interleave(group, dim=2)
        return torch.einsum("thl,tlhd->thd", weights, seen_values)
