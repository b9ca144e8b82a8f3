"""Sums, on the device, how long steps wait for other ranks and how long they sample: inside CUDA graphs, and without an event.

The next replay of a graph records the graph's events anew, and it is queued before the host reads them. A sum on the device has
no such race: it travels with the step's tokens, in the same copy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from llama_core.execution.fused.ops import Ops

NUM_SUMS: Final = 2
_WAITED, _SAMPLED = range(NUM_SUMS)


class StepClock:
    """sums: int64 [NUM_SUMS] on the device, in nanoseconds. They are valid after a whole step only."""

    def __init__(self, ops: Ops, sums: torch.Tensor) -> None:
        self._ops = ops
        self._sums = sums

    @contextmanager
    def waiting(self, times: int = 1) -> Iterator[None]:
        """Add the time of the operations inside the block, times `times`, to the time of waiting."""
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
    """The sums in seconds, as of the latest step that was read. Any thread may read them."""

    waited = 0.0
    sampled = 0.0

    def read(self, sums: torch.Tensor) -> None:
        """sums: a copy of `StepClock.sums` on the host."""
        waited, sampled = sums.tolist()
        # A step with prompt log-probabilities is read before the one that is still in flight.
        self.waited, self.sampled = max(self.waited, waited / 1e9), max(self.sampled, sampled / 1e9)
