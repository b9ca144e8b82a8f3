"""Slices of memory-mapped tensors, their places in the file, and the release of their pages after a copy."""

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

CHUNK_BYTES = 2 << 20  # of mapped pages in memory while a weight is copied


def row_chunks(tensor: torch.Tensor, unit: int = 1) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows, whole `unit`s each, that span about CHUNK_BYTES of the file, gaps between rows included."""
    row_bytes = max(1, tensor.stride(0) * tensor.itemsize)
    rows = unit * max(1, CHUNK_BYTES // (unit * row_bytes))
    for begin in range(0, tensor.shape[0], rows):
        yield begin, min(begin + rows, tensor.shape[0])


def file_begin(mapped: torch.Tensor) -> int | None:
    """The address of byte 0 of the file of which `mapped` is a part, mapped or not. None where the system does not tell."""
    address = mapped.data_ptr()
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        span, _, offset, _, inode, *_ = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end:
            return begin - int(offset, 16) if inode != "0" else None
    return None


_libc = ctypes.CDLL(None, use_errno=True)


def release(mapped: torch.Tensor) -> None:
    """Release the pages under a mapped tensor, which this process has copied."""
    if not hasattr(mmap, "MADV_DONTNEED") or not mapped.numel():
        return
    begin = mapped.data_ptr()
    end = begin + ((mapped.shape[0] - 1) * mapped.stride(0) + 1) * mapped.itemsize
    # Whole pages only. A page at an edge also holds other values; the system reads it again if they are needed.
    begin -= begin % mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
