"""How much memory a rank may still take, on its device or on its host."""

import torch

from llama_core.host_memory import available_host_bytes
from llama_core.parallel import Parallel

CACHE_SHARE_OF_FREE = 0.5  # of the host memory that is free after load; the rest is for activations and everyone else
GPU_HEADROOM = 0.1  # of the device's memory, left free for activations and the allocator


def free_cache_bytes(parallel: Parallel) -> int:
    """Bytes that one rank may take for its cache, when nobody said."""
    if parallel.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(parallel.device)
        return int(free - total * GPU_HEADROOM)
    return int(available_host_bytes() * CACHE_SHARE_OF_FREE) // parallel.world_size
