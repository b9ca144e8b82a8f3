"""The all-gather of native ranks: shared memory between ranks of one node, gloo as the fallback between nodes."""

import ctypes
import mmap
import os
import secrets

import torch
import torch.distributed as dist

from llama_core.backends.parallel import Parallel, smallest

_NONCE_BYTES = 16


def shared_memory(parallel: Parallel, num_bytes: int) -> mmap.mmap | None:
    """`num_bytes` of zeros, mapped by every rank; None on every rank unless all could map it.

    The memory has no name, so it disappears with the processes: the other ranks open rank 0's descriptor through /proc. A nonce
    after the bytes shows whether a rank opened the right descriptor, because nodes may have processes with equal ids.
    """
    greeting = torch.zeros(_NONCE_BYTES + 16, dtype=torch.uint8)
    descriptor = -1
    mapped: mmap.mmap | None = None
    try:
        if parallel.rank == 0:
            try:
                nonce = secrets.token_bytes(_NONCE_BYTES)
                descriptor = os.memfd_create("llama-ranks")
                os.posix_fallocate(descriptor, 0, num_bytes + _NONCE_BYTES)
                os.pwrite(descriptor, nonce, num_bytes)
                where = os.getpid().to_bytes(8, "big") + descriptor.to_bytes(8, "big")
                greeting = torch.frombuffer(bytearray(nonce + where), dtype=torch.uint8)
            except OSError:
                pass  # the greeting stays zero, which no nonce is
        dist.broadcast(greeting, src=0)
        said = bytes(greeting.tolist())
        nonce, pid, number = (
            said[:_NONCE_BYTES],
            int.from_bytes(said[_NONCE_BYTES:-8], "big"),
            int.from_bytes(said[-8:], "big"),
        )
        try:
            if parallel.rank and any(nonce):
                descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            if descriptor >= 0 and os.pread(descriptor, _NONCE_BYTES, num_bytes) == nonce and any(nonce):
                mapped = mmap.mmap(descriptor, num_bytes)
        except OSError:
            mapped = None
        if not smallest(parallel, mapped is not None):
            return None
        return mapped
    finally:
        # Every rank has opened the memory by now: `smallest` waits for all.
        if descriptor >= 0:
            os.close(descriptor)


class GlooFallback:
    """All-gathers bytes over torch's group for the engine. An exception cannot pass through C, so `reraise` raises it later."""

    def __init__(self, parallel: Parallel) -> None:
        self._error: BaseException | None = None
        ranks = parallel.world_size

        def gather(send: int, receive: int, num_bytes: int) -> int:
            try:
                mine = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(send), dtype=torch.uint8)
                buffer = (ctypes.c_uint8 * (num_bytes * ranks)).from_address(receive)
                dist.all_gather(list(torch.frombuffer(buffer, dtype=torch.uint8).view(ranks, -1).unbind()), mine)
                return 0
            except BaseException as error:
                self._error = self._error or error
                return 1

        self.function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(gather)

    def reraise(self) -> None:
        assert self._error is not None
        raise self._error
