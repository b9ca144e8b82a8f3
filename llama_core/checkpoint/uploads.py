"""Copies slices of memory-mapped weights to their device."""

from typing import Any

import torch


class Uploads:
    """On a CPU, plain copies. On a GPU, copies through two page-locked buffers in turn: the host reads the next slice from the
    file while the last one travels. Without these buffers every copy would wait, and the driver would stage it in small pieces.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_staged = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._copied: list[Any] = [None, None]
        self._turn = 0

    def copy(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copy `values` to `target`, which may have another dtype. On a GPU the copy may still run when this returns."""
        if not self._is_staged:
            target.copy_(values)
            return
        turn, self._turn = self._turn, 1 - self._turn
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()
        if len(self._buffers[turn]) < values.nbytes:
            self._buffers[turn] = torch.empty(values.nbytes, dtype=torch.uint8, pin_memory=True)
        staged = self._buffers[turn][: values.nbytes].view(values.dtype).view(values.shape)
        staged.copy_(values)
        if staged.dtype == target.dtype:
            target.copy_(staged, non_blocking=True)
        else:  # converted on the device, because the host is slower
            target.copy_(staged.to(target.device, non_blocking=True))
        self._copied[turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied[turn].record()
