"""Times work of a device, and what the device reaches at best. On a CPU the same, so that sections run there too."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from benchmarks.harness.common import Spread


class Clock(Protocol):
    device: torch.device

    @property
    def name(self) -> str: ...

    def milliseconds(self, work: Callable[[], object], repeats: int) -> Spread:
        """Of the device, for work that is queued; after a warm-up."""

    def synchronize(self) -> None: ...

    def recorded(self, work: Callable[[], object]) -> Callable[[], object]:
        """The same work as a graph, which a host launches faster than its kernels run. It has run once."""

    def free_bytes(self, *, releases: bool = True) -> int:
        """Memory that is free on the device. releases: after torch has given back what it keeps for later tensors."""


class HostClock:
    device = torch.device("cpu")
    name = "cpu"

    def milliseconds(self, work: Callable[[], object], repeats: int) -> Spread:
        work()
        found = []
        for _ in range(repeats):
            begin = time.perf_counter()
            work()
            found.append((time.perf_counter() - begin) * 1e3)
        return Spread.of(found)

    def synchronize(self) -> None:
        pass

    def recorded(self, work: Callable[[], object]) -> Callable[[], object]:
        work()
        return work

    def free_bytes(self, *, releases: bool = True) -> int:
        """As if the machine's memory were the device's."""
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


class CudaClock:
    def __init__(self) -> None:
        self.device = torch.device("cuda")

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name()

    def milliseconds(self, work: Callable[[], object], repeats: int) -> Spread:
        found = []
        for _ in range(repeats + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
        return Spread.of(found[3:])

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def recorded(self, work: Callable[[], object]) -> Callable[[], object]:
        work()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def free_bytes(self, *, releases: bool = True) -> int:
        if releases:
            gc.collect()
            torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]


def clock_of(device: str) -> Clock:
    return CudaClock() if device == "cuda" else HostClock()


def read_gb_s(clock: Clock, num_bytes: int, repeats: int) -> Spread:
    """GB/s of the fastest of torch's own reductions over a buffer that no cache holds."""
    words = torch.ones(num_bytes // 4, dtype=torch.float32, device=clock.device)
    kernels: tuple[Callable[[], object], ...] = (words.sum, words.amax, words.view(-1, 1024).sum)
    times = min((clock.milliseconds(kernel, repeats) for kernel in kernels), key=lambda spread: spread.median)
    return rates(times, num_bytes / 1e6)


def product_tflop_s(clock: Clock, rows: int, outputs: int, inputs: int, dtype: torch.dtype, repeats: int) -> Spread:
    """TFLOP/s of x [rows, inputs] times w [outputs, inputs], with random values: zeros need less power, and run faster."""
    x = torch.randn(rows, inputs, device=clock.device).to(dtype)
    w = torch.randn(outputs, inputs, device=clock.device).to(dtype)
    times = clock.milliseconds(lambda: torch.nn.functional.linear(x, w), repeats)
    return rates(times, 2 * rows * outputs * inputs / 1e9)


def rates(times: Spread, amount: float) -> Spread:
    """amount / time, for each of the figures of `times`."""
    middle, low, high = amount / times.median, amount / times.high, amount / times.low
    return Spread(middle, low, high, amount / times.most, amount / times.least, times.count)
