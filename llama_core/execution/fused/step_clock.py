"""Sums, on the device, how long steps wait for other ranks and how long they sample: inside CUDA graphs, and without an event.

An event in a graph is recorded anew by the next replay, which is queued before the host reads it. A sum on the device has no
such race: it travels with the step's tokens, in the same copy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from llama_core.execution.fused.ops import Ops

NUM_SUMS: Final = 2
_WAITED, _SAMPLED = range(NUM_SUMS)


class StepClock:
    """sums: int64 [NUM_SUMS] on the device, in nanoseconds. They are right behind a whole step."""

    def __init__(self, ops: Ops, sums: torch.Tensor) -> None:
        self._ops = ops
        self._sums = sums

    @contextmanager
    def waiting(self, times: int = 1) -> Iterator[None]:
        """Count the operations inside as waiting, `times` over."""
        with self._added_to(_WAITED, times):
            yield

    @contextmanager
    def sampling(self) -> Iterator[None]:
        with self._added_to(_SAMPLED, 1):
            yield

    @contextmanager
    def _added_to(self, index: int, times: int) -> Iterator[None]:
        self._ops.add_time(self._sums, index, -times)
        yield
        self._ops.add_time(self._sums, index, times)


class StepSeconds:
    """The sums on the host, as the latest step that was read left them. From any thread."""

    waited = 0.0
    sampled = 0.0

    def read(self, sums: torch.Tensor) -> None:
        """sums: a copy of `StepClock.sums` on the host."""
        waited, sampled = sums.tolist()
        # A step with prompt log-probabilities is read before the one that is still in flight.
        self.waited, self.sampled = max(self.waited, waited / 1e9), max(self.sampled, sampled / 1e9)
