"""Memory of every rank's GPU that all ranks of one host read and write, through torch's symmetric memory."""

import ctypes
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from llama_core.execution.parallel import Parallel, gather_bytes, ranks_with, smallest
from llama_core.host_memory import host_identity

FOREVER: Final = 1 << 62  # polls
VECTOR_BYTES: Final = 16  # that NVLink's switch adds at a time
NO_MULTICAST: Final = "the GPUs have no multicast"
_DRIVER: Final = "libcuda.so.1"
_NATIVE_ATOMICS: Final = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED in cuda.h
_ALIGNMENT: Final = 128
_SIGNAL_BYTES: Final = 8
# Bytes that a rank reads from its peers where one-shot is still faster than NCCL. vLLM's limits for 4 and 8 GPUs with NVLink
# are 512 and 256 KiB of each peer (`csrc/custom_all_reduce.cuh`).
_READ_BYTES: Final = 2 * 2**20


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Two buffers and the signals of each rank. Addresses are valid on this rank's device.

    turn_bytes: of one buffer; the second lies behind the first. buffers, signals: int64 [world_size], addresses by rank; the
    signals of a rank are int64 [max_rows, world_size]. multicast: int64 [1], the address at which NVLink's switch reaches the
    buffers of all ranks, whose rows are multiples of 16 bytes then; 0 without `has_multicast`. epochs: int64 [max_rows], this
    rank's barriers so far, by row. polls: int64 [1], the most reads of a signal in one barrier. missed: int64 [1], not 0 once a
    peer did not arrive within so many. held: what keeps the memory alive.
    """

    rank: int
    world_size: int
    max_rows: int
    turn_bytes: int
    buffers: torch.Tensor
    signals: torch.Tensor
    multicast: torch.Tensor
    has_multicast: bool
    epochs: torch.Tensor
    polls: torch.Tensor
    missed: torch.Tensor
    held: Any = field(repr=False, default=None)

    @classmethod
    def of(
        cls,
        rank: int,
        max_rows: int,
        row_bytes: int,
        bases: list[int],
        device: torch.device,
        held: Any,
        multicast: int = 0,
    ) -> "PeerMemory":
        """bases: by rank, the address of `nbytes` zeros. multicast: their address at the switch, or 0."""
        turn_bytes = _turn_bytes(max_rows, row_bytes)
        buffers = torch.tensor(bases, dtype=torch.int64, device=device)
        epochs = torch.zeros(max_rows, dtype=torch.int64, device=device)
        polls, missed = torch.full_like(epochs[:1], FOREVER), torch.zeros_like(epochs[:1])
        signals = buffers + 2 * turn_bytes
        at_switch = torch.full_like(polls, multicast)
        return cls(
            rank,
            len(bases),
            max_rows,
            turn_bytes,
            buffers,
            signals,
            at_switch,
            multicast != 0,
            epochs,
            polls,
            missed,
            held,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return 2 * self.turn_bytes + self.max_rows * self.world_size * _SIGNAL_BYTES


def _turn_bytes(max_rows: int, row_bytes: int) -> int:
    return -(-max_rows * row_bytes // _ALIGNMENT) * _ALIGNMENT


def peer_bytes(world_size: int, max_rows: int, row_bytes: int) -> int:
    """Bytes of one rank's part: two buffers of `max_rows` rows, and the signals of its peers."""
    return 2 * _turn_bytes(max_rows, row_bytes) + max_rows * world_size * _SIGNAL_BYTES


def one_shot_rows(world_size: int, row_bytes: int, num_processors: int) -> int:
    """The most rows of a one-shot all-reduce. num_processors: multiprocessors of the GPU.

    The programs of all rows must run at once, because each waits for its peers' programs of the same row.
    """
    return min(_READ_BYTES // (row_bytes * (world_size - 1)), num_processors)


def share_memory(parallel: Parallel, max_rows: int, row_bytes: int, *, multicast: bool = False) -> PeerMemory | str:
    """The memory of this group, or why there is none. Every rank gets memory, or none does. All ranks call it together.

    multicast: with an address at NVLink's switch.
    """
    if multicast and row_bytes % VECTOR_BYTES:
        return f"a row's {row_bytes} bytes are no multiple of {VECTOR_BYTES}"
    part = _symmetric(parallel, peer_bytes(parallel.world_size, max_rows, row_bytes))
    if isinstance(part, str):
        return part
    handle, at_switch = part.handle, 0
    if multicast:
        if smallest(parallel, handle.multicast_ptr != 0) == 0:
            return NO_MULTICAST
        at_switch = handle.multicast_ptr  # with the offset, unlike the addresses of the ranks' own buffers
    bases = [address + handle.offset for address in handle.buffer_ptrs]
    return PeerMemory.of(parallel.rank, max_rows, row_bytes, bases, parallel.device, part, at_switch)


def multicast_buffer(parallel: Parallel, rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor | str:
    """A tensor [rows, dim] of this rank that NVLink's switch can add to those of its peers, or why there is none. All ranks
    call it together, as `share_memory`."""
    part = _symmetric(parallel, rows * dim * dtype.itemsize)
    if isinstance(part, str):
        return part
    if smallest(parallel, part.handle.multicast_ptr != 0) == 0:
        return NO_MULTICAST
    return part.tensor.view(dtype).view(rows, dim)


def world_group() -> dist.ProcessGroup:
    """The group of all ranks, which `parallel.join` made."""
    group = dist.group.WORLD
    assert group is not None
    return group


class _Symmetric(NamedTuple):
    tensor: torch.Tensor
    handle: Any


def _symmetric(parallel: Parallel, nbytes: int) -> _Symmetric | str:
    """Zeros [nbytes] of uint8 that all ranks reach, or why there are none."""
    reason = _obstacle(parallel)
    if smallest(parallel, not reason) == 0:
        return reason or "another rank cannot"
    tensor: torch.Tensor | None = None
    part: _Symmetric | None = None
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        tensor = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=parallel.device)
        tensor.zero_()
        # All ranks' signals are zero before a rank learns their addresses.
        torch.cuda.synchronize()
    except Exception as error:  # of the driver, of torch, or of a container that forbids the system calls
        reason = _first_line(error)
    # `rendezvous` waits for all ranks.
    if smallest(parallel, tensor is not None and not reason) == 0 or tensor is None:
        return reason or "another rank cannot"
    try:
        part = _Symmetric(tensor, symmetric_memory.rendezvous(tensor, world_group()))
    except Exception as error:
        reason = _first_line(error)
    if smallest(parallel, part is not None) == 0 or part is None:
        return reason or "another rank cannot"
    return part


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _obstacle(parallel: Parallel) -> str:
    """Why the GPUs of this group cannot read each other's memory, as far as that is known without an attempt; "" if they
    may."""
    if len(ranks_with(parallel, host_identity())) < parallel.world_size:
        return "the ranks are on several hosts"
    own = parallel.device.index or 0
    indices = [int(each) for each in gather_bytes(parallel, str(own).encode())]
    if len(set(indices)) < len(indices) or max(indices) >= torch.cuda.device_count():
        return "a rank does not see the GPUs of its peers"
    peers = [peer for peer in indices if peer != own]
    blocked = [peer for peer in peers if not torch.cuda.can_device_access_peer(own, peer)]
    if blocked:
        return f"GPU {own} cannot read the memory of GPU {blocked[0]}"
    # The kernels' signals are atomic operations in the peer's memory.
    without = [peer for peer in peers if not has_native_atomics(own, peer)]
    return f"the link of GPU {own} to GPU {without[0]} has no native atomics" if without else ""


def has_native_atomics(index: int, peer: int) -> bool:
    """Whether the first GPU's atomic operations in the second one's memory are atomic, as over NVLink; over PCIe they are not.
    torch does not say it, so the driver does. False if it fails."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return False
    found, devices = ctypes.c_int(0), (ctypes.c_int(), ctypes.c_int())
    failed = driver.cuInit(0) or any(
        driver.cuDeviceGet(ctypes.byref(device), each) for device, each in zip(devices, (index, peer), strict=True)
    )
    failed = failed or driver.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, *devices)
    return not failed and found.value == 1
