"""Uploads through page-locked buffers, on a device whose copies run as late as their order allows."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_core.checkpoint.loader import _extremes, _first_not_finite
from llama_core.checkpoint.uploads import Uploads

BUFFER = 1024


class LateCopies:
    """`Transfers` whose queue runs when a point in it is waited for."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.buffers: list[torch.Tensor] = []
        self.num_waits = 0

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        self.buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> None:
        self.queue.append(lambda: target.copy_(staged))

    def record(self) -> "Point":
        return Point(self, len(self.queue))


class Point:
    def __init__(self, copies: LateCopies, end: int) -> None:
        self._copies, self._end = copies, end

    def wait(self) -> None:
        """Later copies stay in the queue; those that ran leave a no-op behind."""
        self._copies.num_waits += 1
        for index in range(self._end):
            self._copies.queue[index]()
            self._copies.queue[index] = lambda: None


def uploaded(values: list[torch.Tensor], dtype: torch.dtype) -> tuple[list[torch.Tensor], LateCopies]:
    copies = LateCopies()
    uploads = Uploads(torch.device("cpu"), copies, BUFFER)
    targets = [torch.full(value.shape, -1, dtype=dtype) for value in values]
    for target, value in zip(targets, values, strict=True):
        uploads.copy(target, value)
    copies.record().wait()
    return targets, copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slice_arrives_whole_however_late_its_copy_runs(dtype: torch.dtype) -> None:
    """Slices of many sizes, also larger than a buffer, of which some fill a buffer to its last byte."""
    sizes = [1, 7, 100, 256, 13, 256, 1000, 3, 90, 256, 255, 2, 700]
    values = [torch.randn(size, generator=torch.Generator().manual_seed(size + i)) for i, size in enumerate(sizes)]
    targets, copies = uploaded(values, dtype)
    assert all(torch.equal(target, value.to(dtype)) for target, value in zip(targets, values, strict=True))
    assert len(copies.buffers) <= 4, "two, and one for each slice that is larger than any before"


def test_the_host_waits_once_a_buffer_and_not_once_a_slice() -> None:
    values = [torch.full((16,), float(i)) for i in range(400)]  # of 64 bytes each
    targets, copies = uploaded(values, torch.float32)
    assert all(torch.equal(target, value) for target, value in zip(targets, values, strict=True))
    assert len(copies.buffers) == 2 and copies.num_waits - 1 == 400 * 64 // BUFFER - 1


def test_matrices_and_parts_of_columns_arrive_in_their_places() -> None:
    weight, values = torch.zeros(8, 10), torch.randn(8, 4)
    copies = LateCopies()
    Uploads(torch.device("cpu"), copies, BUFFER).copy(weight[:, 3:7], values)
    copies.record().wait()
    assert torch.equal(weight[:, 3:7], values) and not weight[:, :3].any() and not weight[:, 7:].any()


def test_one_look_at_a_weight_names_the_file_of_the_first_value_that_is_not_finite() -> None:
    """As on a GPU, where slices are not looked at one by one."""
    weight = torch.ones(6, 4)
    pieces = [(Path(name), weight[at : at + 2]) for name, at in (("a", 0), ("b", 2), ("c", 4))]
    assert _first_not_finite(weight, pieces, []) is None
    weight[5, 0], weight[3, 1] = float("inf"), float("nan")
    assert _first_not_finite(weight, pieces, []) == Path("b")
    assert _first_not_finite(weight, pieces, [_extremes(target) for _, target in pieces]) == Path("b")
    assert _first_not_finite(weight, [], []) is None
