"""How much memory this host, or this container, still has. No torch: asked before there is any."""

import contextlib
import os
from pathlib import Path

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


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
