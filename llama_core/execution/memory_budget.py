"""Memory that a rank may still allocate, on its device or on its host."""

import math

import torch

from llama_core.checkpoint.weights import is_linear, weight_specs
from llama_core.errors import ConfigError
from llama_core.execution.parallel import Parallel, ranks_with, smallest
from llama_core.execution.weight_formats.format import WeightFormat
from llama_core.host_memory import available_host_bytes, host_identity
from llama_core.model_config import ModelConfig

CACHE_SHARE_OF_FREE = 0.5  # of the host memory that is free after loading; activations and other processes get the rest
GPU_HEADROOM = 0.1  # of the device's memory, left free for activations and the allocator


def planned_weight_bytes(
    config: ModelConfig, dtype: torch.dtype, weight_format: WeightFormat, parallel: Parallel
) -> int:
    """Bytes of this rank's weights: those of linear layers in `weight_format`, embeddings and norms in `dtype`."""
    total = 0.0
    for name, spec in weight_specs(config).items():
        num_values = math.prod(spec.part(parallel.rank, parallel.world_size).shape)
        total += num_values * (weight_format.bytes_per_weight if is_linear(name) else dtype.itemsize)
    return math.ceil(total)


def check_weights_fit(num_bytes: int, parallel: Parallel) -> None:
    """Raises ConfigError on every rank if the weights of any rank do not fit into the free memory of its device, or of its
    host together with those of the other ranks there. Every rank calls this before any rank allocates memory.

    Without this check the kernel would end a process to free memory, possibly another user's.
    """
    if parallel.device.type == "cuda":
        num_sharing, free = 1, torch.cuda.mem_get_info(parallel.device)[0]
    else:
        num_sharing, free = len(ranks_with(parallel, host_identity())), available_host_bytes()
    fits = num_bytes * num_sharing <= free
    if not smallest(parallel, fits):
        need = f"{num_sharing} of {parallel.world_size} ranks here need {num_bytes:,} bytes each"
        raise ConfigError(
            f"the weights do not fit: {need}, {free:,} are free"
            + ("" if fits else ": use more ranks, or int8 weights"),
            param="model_parallel_size",
        )


def free_cache_bytes(parallel: Parallel) -> int:
    """Bytes that one rank may use for its cache if `kv_cache_bytes` is not set."""
    if parallel.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(parallel.device)
        return int(free - total * GPU_HEADROOM)
    return int(available_host_bytes() * CACHE_SHARE_OF_FREE) // parallel.world_size
