"""How much memory a rank may still take, on its device or on its host."""

import torch

from llama_core.errors import ConfigError
from llama_core.host_memory import available_host_bytes
from llama_core.parallel import Parallel

CACHE_SHARE_OF_FREE = 0.5  # of the host memory that is free after load; the rest is for activations and everyone else
GPU_HEADROOM = 0.1  # of the device's memory, left free for activations and the allocator


def check_weights_fit(num_bytes: int, parallel: Parallel) -> None:
    """Raises ConfigError where this rank's weights do not fit into what its device or host has free.

    An error that can be told, instead of a process that the kernel picks to end: maybe another's.
    """
    on_gpu = parallel.device.type == "cuda"
    free = torch.cuda.mem_get_info(parallel.device)[0] if on_gpu else available_host_bytes()
    if num_bytes > free:
        raise ConfigError(
            f"the weights of rank {parallel.rank} of {parallel.world_size} need {num_bytes:,} bytes, and {free:,} are free: "
            "give more ranks, or int8 weights",
            param="model_parallel_size",
        )


def free_cache_bytes(parallel: Parallel) -> int:
    """Bytes that one rank may take for its cache, when nobody said."""
    if parallel.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(parallel.device)
        return int(free - total * GPU_HEADROOM)
    return int(available_host_bytes() * CACHE_SHARE_OF_FREE) // parallel.world_size
