"""How much memory a rank may still take, on its device or on its host."""

import contextlib
import os
from pathlib import Path

import torch

from llama_core.parallel import Parallel

CACHE_SHARE_OF_FREE = 0.5  # of the host memory that is free after load; the rest is for activations and everyone else
GPU_HEADROOM = 0.1  # of the device's memory, left free for activations and the allocator
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_cache_bytes(parallel: Parallel) -> int:
    """Bytes that one rank may take for its cache, when nobody said."""
    if parallel.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(parallel.device)
        return int(free - total * GPU_HEADROOM)
    return int(available_host_bytes() * CACHE_SHARE_OF_FREE) // parallel.world_size


def available_host_bytes() -> int:
    """Memory that this process could still get: the machine's, or what its container's limit leaves (cgroup v2, v1)."""
    try:
        meminfo = Path("/proc/meminfo").read_text()
        available = next(
            int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for limit, used in _CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            available = min(available, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(available, 0)
