"""Copies slices of weights from their files to their device.

On a GPU a few threads read them straight into memory. A copy of mapped memory pays for a page fault each few pages, and again
to release them. torch divides such a copy among threads of its own, which costs several times more where other processes need
the cores.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Protocol

import torch

from llama_core.errors import CheckpointError
from llama_core.files.source import Slice

MOST_THREADS: Final = 4
# Shorter rows with gaps between them are copied from the mapped file: a call for each takes longer, up to three times at 1 KiB.
_LEAST_ROW_BYTES: Final = 8192


class FileReads:
    """Each file is opened once. `close` ends the threads."""

    def __init__(self, num_threads: int = 0) -> None:
        """num_threads: at most MOST_THREADS of the process's cores if 0."""
        self._threads = ThreadPoolExecutor(num_threads or min(MOST_THREADS, len(os.sched_getaffinity(0))), "read")
        self._files: dict[Path, int] = {}

    def begin(self, piece: Slice, target: torch.Tensor) -> Callable[[], None] | None:
        """Begin to read the slice into uint8 `target` [its bytes]. Returns a wait for the end, which raises CheckpointError if
        the file cannot be read; None for a slice that has to be copied from `values`."""
        values = piece.values
        if piece.offset is None or not values.numel() or not 1 <= values.dim() <= 2 or values.stride(-1) != 1:
            return None
        rows, row_bytes, stride = 1, values.nbytes, 0
        if not values.is_contiguous():
            rows, row_bytes = len(values), values.nbytes // len(values)
            stride = values.stride(0) * values.itemsize
            if row_bytes < _LEAST_ROW_BYTES:
                return None
        file = self._open(piece.file)
        offset, memory = piece.offset, memoryview(target.numpy())  # type: ignore[arg-type]

        def read() -> None:
            for row in range(rows):
                _read(piece.file, file, offset + row * stride, memory[row * row_bytes : (row + 1) * row_bytes])

        began: Future[None] = self._threads.submit(read)
        return began.result

    def close(self) -> None:
        """Reads that have begun end first: their memory may be freed afterwards."""
        self._threads.shutdown(cancel_futures=True)
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _open(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        return self._files[path]


def _read(path: Path, file: int, offset: int, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        try:
            count = os.preadv(file, [memory[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        if count == 0:
            raise CheckpointError(f"{path}: has become shorter while it was read")
        done += count


BUFFER_BYTES: Final = 32 * 2**20
_ALIGNMENT: Final = 64  # of each slice in a buffer
_AHEAD: Final = 2 * MOST_THREADS  # slices that are read while the oldest one is waited for


class Copied(Protocol):
    """A point after the copies queued before it."""

    def synchronize(self) -> None:
        """Block the host until they are done."""


class Transfers(Protocol):
    """What uploads ask of a device. The tests implement it by copies that run as late as their order allows."""

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] on the host, which `copy` neither reads before its turn nor holds up the host for."""

    def copy(self, target: torch.Tensor, staged: torch.Tensor) -> None:
        """Queue a copy to the device. The dtypes may differ."""

    def record(self) -> Copied:
        """The point after all copies so far."""


class _Staged(NamedTuple):
    """A slice in a buffer. read: waits until it is there; None if it is."""

    target: torch.Tensor
    staged: torch.Tensor
    read: Callable[[], None] | None


class Uploads:
    """On a CPU, plain copies. On a GPU, copies through two large page-locked buffers in turn: threads read one from the files
    while the other travels, and the host waits once a buffer. Without these buffers every copy would wait, and the driver
    would stage it in small pieces.

    A context manager: its end waits for reads that were begun, not for copies.
    """

    def __init__(
        self,
        device: torch.device,
        transfers: Transfers | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        reads: FileReads | None = None,
    ) -> None:
        """transfers: of CUDA if absent, and none on a CPU."""
        self._transfers = transfers or (CudaTransfers() if device.type == "cuda" else None)
        self._reads = reads or (FileReads() if self._transfers is not None else None)
        self._staged: deque[_Staged] = deque()
        self._buffer_bytes = buffer_bytes
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._copied: list[Copied | None] = [None, None]
        self._turn = 0
        self._used = 0

    @property
    def are_asynchronous(self) -> bool:
        """Whether copies may still run when `copy` returns."""
        return self._transfers is not None

    def copy(self, target: torch.Tensor, piece: Slice) -> None:
        """Copy the slice's values to `target`, which may have another dtype. On a GPU the copy is queued by `flush` at the
        latest."""
        values = piece.values
        if self._transfers is None or self._reads is None:
            target.copy_(values)
            return
        room = self._room(self._transfers, values.nbytes)
        staged = room.view(values.dtype).view(values.shape)
        read = self._reads.begin(piece, room)
        if read is None:
            staged.copy_(values)
        self._staged.append(_Staged(target, staged, read))
        self._send(self._transfers, at_most=len(self._staged) - _AHEAD)

    def flush(self) -> None:
        """Queue all copies on the device. Raises CheckpointError for a file that cannot be read."""
        if self._transfers is not None:
            self._send(self._transfers)

    def __enter__(self) -> "Uploads":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reads is not None:
            self._reads.close()

    def _send(self, transfers: Transfers, at_most: int | None = None) -> None:
        """Queue the copies of staged slices, in their order. at_most: of them; all if absent."""
        for _ in range(len(self._staged) if at_most is None else at_most):
            target, staged, read = self._staged.popleft()
            if read is not None:
                read()
            transfers.copy(target, staged)

    def _room(self, transfers: Transfers, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of a buffer from which nothing travels."""
        buffer = self._buffers[self._turn]
        if buffer is None or self._used + num_bytes > len(buffer):
            self._send(transfers)
            self._copied[self._turn] = transfers.record()
            self._turn, self._used = 1 - self._turn, 0
            earlier = self._copied[self._turn]
            if earlier is not None:
                earlier.synchronize()
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
        event: Copied = torch.cuda.current_stream().record_event()
        return event
