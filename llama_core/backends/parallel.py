"""The group of ranks that share one model: this rank's number, its device, and collective operations on small values.

Other modules receive a `Parallel`. A rank without peers creates no process group, because gloo starts 12 threads that wake 400
times a second.
"""

import atexit
import datetime
import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import Store

from llama_core.config import Device
from llama_core.errors import ConfigError
from llama_core.model.share import SAMPLING_RANK

_before_leaving: list[Callable[[], None]] = []
_stores: list[Store] = []  # the group calls a store of Python's, and does not keep it alive


@dataclass(frozen=True, slots=True)
class Parallel:
    """One rank's view of its group: `world_size` ranks, each with its share of the model on its `device`."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def samples(self) -> bool:
        """Whether this rank samples, for all."""
        return self.rank == SAMPLING_RANK

    def share_samples(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of the rank that samples on every rank, in place. `tensor` has the same shape and dtype on all ranks."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=SAMPLING_RANK)
        return tensor

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors on every rank, in place. `partial` has the same shape and dtype on all ranks."""
        if self.world_size > 1:
            dist.all_reduce(partial)
        return partial

    def sum_in_rank_order(self, partial: torch.Tensor) -> torch.Tensor:
        """What `sum` computes, in float32 and in the order of the ranks, then rounded: a new tensor.

        The order of `sum` may depend on the size of the tensor. This gathers all parts, which is more traffic.
        """
        if self.world_size == 1:
            return partial
        parts = torch.empty((self.world_size, *partial.shape), dtype=partial.dtype, device=partial.device)
        dist.all_gather_into_tensor(parts.flatten(0, 1), partial.contiguous())
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(partial.dtype)

    def gather_columns(self, part: torch.Tensor, widths: Seq[int]) -> torch.Tensor:
        """Each rank's columns [T, widths[rank]], side by side: [T, sum(widths)] on every rank.

        Narrower parts are padded, because NCCL gathers equal parts only, and a CUDA graph needs fixed shapes.
        """
        if self.world_size == 1:
            return part
        count, widest = len(part), max(widths)
        padded = F.pad(part, (0, widest - part.shape[1])).contiguous()
        parts = torch.empty((self.world_size * count, widest), dtype=part.dtype, device=part.device)
        dist.all_gather_into_tensor(parts, padded)
        by_rank = parts.view(self.world_size, count, widest)
        if min(widths) == widest:
            return by_rank.transpose(0, 1).flatten(1)
        return torch.cat([by_rank[rank, :, :width] for rank, width in enumerate(widths)], dim=1)


def resolve_device(device: Device, index: int = 0) -> torch.device:
    """The torch device. "auto" is CUDA if there is a CUDA device, else the CPU. `index`: of the visible devices."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device", param="device")
    return torch.device("cuda", index % torch.cuda.device_count())


def join(
    rank: int, world_size: int, device: Device, store: Store, timeout_s: float = 600.0, device_index: int = 0
) -> Parallel:
    """Join the group whose ranks meet at `store`, as `rank`: with NCCL on CUDA, gloo on the CPU. Once in each process.

    A collective operation that waits longer than `timeout_s` for its peers raises. `device_index`: of this rank's GPU among the
    visible ones.
    """
    resolved = resolve_device(device, device_index)
    if resolved.type == "cuda" and device_index >= (seen := torch.cuda.device_count()):
        raise ConfigError(f"rank {rank} is to use the GPU with index {device_index}, torch sees {seen}", param="device")
    timeout = datetime.timedelta(seconds=timeout_s)
    _stores.append(store)
    _make_group(resolved, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return Parallel(rank, world_size, resolved)


def alone(device: Device) -> Parallel:
    """A group of one rank, for use in process. A process may have any number of them."""
    if dist.is_initialized() and dist.get_world_size() != 1:
        raise ConfigError("this process belongs to a group of several ranks already", param="model_parallel_size")
    return Parallel(0, 1, resolve_device(device))


def from_torchrun(device: Device) -> Parallel:
    """The group that torchrun's environment variables describe. Later calls return the same group."""
    resolved = resolve_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        _make_group(resolved)
        # A group that still exists when the interpreter ends sometimes aborts the process; torchrun then reports a failure.
        atexit.register(leave)
    return Parallel(dist.get_rank(), dist.get_world_size(), resolved)


def before_leaving(forget: Callable[[], None]) -> None:
    """Register a function that `leave` calls first, to drop objects that belong to the group."""
    if forget not in _before_leaving:
        _before_leaving.append(forget)


def smallest(parallel: Parallel, value: int) -> int:
    """The smallest `value` of all ranks, on every rank."""
    if parallel.world_size == 1:
        return int(value)
    tensor = torch.tensor([value], dtype=torch.int64, device=parallel.device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return int(tensor.item())


def ranks_with(parallel: Parallel, value: int) -> list[int]:
    """The ranks that pass the same `value` as this rank, this rank included, in ascending order."""
    own = value.to_bytes(8, "big", signed=True)
    return [rank for rank, other in enumerate(gather_bytes(parallel, own)) if other == own]


def gather_bytes(parallel: Parallel, value: bytes) -> list[bytes]:
    """Every rank's `value`, by rank, on every rank. The values may differ in length."""
    lengths = [int(length.item()) for length in _gather(parallel, torch.tensor([len(value)], dtype=torch.int64))]
    padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
    padded[: len(value)] = torch.tensor(list(value), dtype=torch.uint8)
    values = _gather(parallel, padded)
    return [bytes(other[:length].tolist()) for other, length in zip(values, lengths, strict=True)]


def _gather(parallel: Parallel, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's `tensor`, by rank; shape and dtype are the same on all ranks."""
    if parallel.world_size == 1:
        return [tensor]
    own = tensor.to(parallel.device)
    values = [torch.empty_like(own) for _ in range(parallel.world_size)]
    dist.all_gather(values, own)
    return values


def leave() -> None:
    """Leave the group, if there is one. With CUDA, call it only while every peer is alive; otherwise end the process."""
    for forget in _before_leaving:
        forget()
    if dist.is_initialized():
        dist.destroy_process_group()


def device_name(device: torch.device) -> str:
    """The device for people, such as "cpu (8 threads)"."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' if threads > 1 else ''})"


def _make_group(device: torch.device, **options: Any) -> None:
    """options: of `init_process_group`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Registration of graphs' buffers is a collective of its own: where one rank fails to capture, the others would wait for
        # it. Without it a capture waits for no rank, because the steps before it have opened all channels. So no shorter time
        # limit is set for captures: it would only end a group whose ranks capture at different speeds.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        # A thread of torch's would ask the store each second whether to write a dump: a Ray call between nodes.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
