"""How much memory this host, or this container, still has. No torch: asked before there is any."""

import contextlib
import hashlib
import os
import socket
from pathlib import Path

CGROUPS = (  # directory, limit, use, and what of the latter is file cache
    ("/sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def available_host_bytes() -> int:
    """Memory that this process could still get: the machine's, or what its container's limit leaves (cgroup v2, v1), with the
    cache of files, which gives way: the checkpoint has just been read into it.
    """
    try:
        meminfo = Path("/proc/meminfo").read_text()
        available = next(
            int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for directory, limit, used, of_files in CGROUPS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            left = int(Path(directory, limit).read_text()) - int(Path(directory, used).read_text())
            stat = dict(line.split() for line in Path(directory, "memory.stat").read_text().splitlines())
            available = min(available, left + sum(int(stat.get(name, 0)) for name in of_files))
    return max(available, 0)


def host_identity() -> int:
    """The same for processes that share a host's memory, or a container's; 63 bits."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{boot.read_text() if boot.exists() else ''} {socket.gethostname()}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
