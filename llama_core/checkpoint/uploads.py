"""Copies slices of memory-mapped weights to their device."""

from typing import Final, Protocol

import torch

BUFFER_BYTES: Final = 32 * 2**20
_ALIGNMENT: Final = 64  # of each slice in a buffer


class Copied(Protocol):
    """A point behind copies that were queued."""

    def wait(self) -> None:
        """Block the host until they are done."""


class Transfers(Protocol):
    """What uploads ask of a device. The tests implement it by copies that run as late as their order allows."""

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the host, which `copy` neither reads before its turn nor holds up the host for."""

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> None:
        """Queue a copy to the device. The dtypes may differ."""

    def record(self) -> Copied:
        """The point behind all copies so far."""


class Uploads:
    """On a CPU, plain copies. On a GPU, copies through two large page-locked buffers in turn: the host fills one from the files
    while the other travels, and waits once a buffer. Without these buffers every copy would wait, and the driver would stage
    it in small pieces.
    """

    def __init__(
        self, device: torch.device, transfers: Transfers | None = None, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        """transfers: of CUDA if absent, and none on a CPU."""
        self._transfers = transfers or (CudaTransfers() if device.type == "cuda" else None)
        self._buffer_bytes = buffer_bytes
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._copied: list[Copied | None] = [None, None]
        self._turn = 0
        self._used = 0

    def copy(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copy `values` to `target`, which may have another dtype. On a GPU the copy may still run when this returns."""
        if self._transfers is None:
            target.copy_(values)
            return
        staged = self._room(self._transfers, values.nbytes).view(values.dtype).view(values.shape)
        staged.copy_(values)
        self._transfers.copy(target, staged)

    def _room(self, transfers: Transfers, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of a buffer from which nothing travels."""
        buffer = self._buffers[self._turn]
        if buffer is None or self._used + num_bytes > len(buffer):
            self._copied[self._turn] = transfers.record()
            self._turn, self._used = 1 - self._turn, 0
            earlier = self._copied[self._turn]
            if earlier is not None:
                earlier.wait()
            buffer = self._buffers[self._turn]
            if buffer is None or num_bytes > len(buffer):
                buffer = transfers.page_locked(max(num_bytes, self._buffer_bytes))
                self._buffers[self._turn] = buffer
        begin = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return buffer[begin : begin + num_bytes]


class CudaTransfers:
    """The current stream of the current CUDA device."""

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> None:
        if staged.dtype != target.dtype:  # converted on the device, because the host is slower
            staged = staged.to(target.device, non_blocking=True)
        target.copy_(staged, non_blocking=True)

    def record(self) -> Copied:
        return _CudaPoint()


class _CudaPoint:
    def __init__(self) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()
