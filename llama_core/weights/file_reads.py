"""Reads of file slices straight into memory, by a few threads.

A copy of mapped memory pays for a page fault each few pages, and again to release them. torch divides such a copy among
threads of its own, which costs several times more where other processes need the cores.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

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
