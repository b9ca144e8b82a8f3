"""Sums the time of parts of a step: by the host's clock on a CPU, by events on a GPU, whose work the host only queues."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch

Result = TypeVar("Result")


class Stopwatch(Protocol):
    """seconds: of all parts up to the latest `read`."""

    seconds: float

    def timing(self) -> AbstractContextManager[None]:
        """Measure the operations inside."""

    def read(self) -> None:
        """Add the parts that the device has computed. Waits for nothing."""


class HostStopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def timing(self) -> Iterator[None]:
        began = perf_counter()
        yield
        self.seconds += perf_counter() - began

    def read(self) -> None:
        pass


class CudaStopwatch:
    """Of the current stream. To be read after each step whose tokens the host has, so that few events wait."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._parts: list[tuple[Any, Any]] = []

    @contextmanager
    def timing(self) -> Iterator[None]:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        yield
        ended.record()
        self._parts.append((began, ended))

    def read(self) -> None:
        num_done = 0
        for began, ended in self._parts:
            if not ended.query():
                break
            self.seconds += began.elapsed_time(ended) / 1e3
            num_done += 1
        del self._parts[:num_done]


def stopwatch_of(device: torch.device) -> Stopwatch:
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()


def timed(function: Callable[[torch.Tensor], Result], stopwatch: Stopwatch) -> Callable[[torch.Tensor], Result]:
    """The function, with each call measured."""

    def call(tensor: torch.Tensor) -> Result:
        with stopwatch.timing():
            return function(tensor)

    return call
