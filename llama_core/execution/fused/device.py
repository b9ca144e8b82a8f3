"""What the fused backend asks of its device: one queue of work, copies, events and graphs. `CudaDevice` implements it.

While the backend serves, it calls CUDA in one other place only: torch reads prompt logprobs from logits for which `compute` has
waited. At the start, weights (`checkpoint/uploads.py`) and the budget of memory (`memory_budget.py`) call CUDA themselves.

`EagerDevice` computes at once. The tests have a third implementation, which runs queued work as late as its
ordering allows, so that a missing wait gives wrong results (`tests/support/simulated_device.py`).
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

Work = Callable[[], object]


class Event(Protocol):
    """A point in the queue."""

    def is_reached(self) -> bool: ...

    def wait(self) -> None:
        """Block the calling thread, which may be any, until all work before this point is done."""


class Graph(Protocol):
    """Captured work, which can be queued any number of times."""

    def replay(self) -> None:
        """Queue the captured work."""


class ThreadWork(Protocol):
    """Work in another thread."""

    def result(self) -> object:
        """Block until the work is done, and what it queued. Raises its error."""


class FusedDevice(Protocol):
    """Runs work in the order in which it was queued. The host waits only in `Event.wait`, `compute` and `synchronize`.

    torch_device: where tensors are. captures: whether `capture` is worth its memory.
    """

    torch_device: torch.device
    captures: bool

    def page_locked(self, *shape: int) -> torch.Tensor:
        """int64 zeros in page-locked host memory. A copy from or to it runs at its turn in the queue, not when it is queued."""

    def queue(self, work: Work) -> None:
        """Queue work that reads and writes tensors of the device only."""

    def compute(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Queue work and block the host until it is done. Any thread may read the result."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between a page-locked tensor and one of the device."""

    def record(self) -> Event:
        """The point behind all work that was queued so far."""

    def warm_up(self, works: list[Work]) -> None:
        """Run all work once, before it is captured: this compiles kernels and opens NCCL's channels."""

    def capture(self, work: Work) -> Graph:
        """A graph of `work`, which runs no part of it. Graphs share the memory of their intermediate tensors. Raises
        RuntimeError where the work cannot be captured."""

    def start_in_thread(self, work: Work) -> ThreadWork:
        """Begin work in another thread, behind all that was queued before. What it queues has a queue of its own; the first
        thread may queue and capture other work meanwhile."""

    def synchronize(self) -> None:
        """Block the host until all work is done. Not beside other threads' captures."""


class _Reached:
    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class EagerDevice:
    """Runs work when it is queued, on a CPU or any other device. Its copies wait."""

    captures = False

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def page_locked(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def queue(self, work: Work) -> None:
        work()

    def compute(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        return work()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record(self) -> Event:
        return _Reached()

    def warm_up(self, works: list[Work]) -> None:
        for work in works:
            work()

    def capture(self, work: Work) -> Graph:
        raise RuntimeError("this device captures nothing")

    def start_in_thread(self, work: Work) -> ThreadWork:
        done: Future[object] = Future()
        done.set_result(work())
        return done

    def synchronize(self) -> None:
        pass


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


class CudaDevice:
    """The current stream of one CUDA device."""

    captures = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._index = torch.cuda.current_device() if torch_device.index is None else torch_device.index
        self._pool: Any = None
        self._stream: Any = None

    def page_locked(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64, pin_memory=True)

    def queue(self, work: Work) -> None:
        work()

    def compute(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        result = work()
        self.synchronize()
        return result

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> Event:
        return _CudaEvent(self._index)

    def warm_up(self, works: list[Work]) -> None:
        # On a separate stream, as torch requires.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for work in works:
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Work) -> Graph:
        graph = torch.cuda.CUDAGraph()
        restored = torch.cuda.stream(torch.cuda.current_stream())  # also after a failed capture
        # thread_local: other threads' calls do not end the capture, such as NCCL's watchdog's queries of its events, and copies
        # and allocations of the thread that loads weights. torch gives the graphs' memory to the captured stream alone.
        captured = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with restored, captured:
            work()
        return graph

    def start_in_thread(self, work: Work) -> ThreadWork:
        self.synchronize()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def run() -> None:
            torch.cuda.set_device(self._index)
            # Captures forbid a wait for the whole device.
            with torch.inference_mode(), torch.cuda.stream(stream):
                work()
                stream.synchronize()

        pool = ThreadPoolExecutor(1, "beside")
        begun = pool.submit(run)
        pool.shutdown(wait=False)
        return begun

    def synchronize(self) -> None:
        torch.cuda.synchronize()
