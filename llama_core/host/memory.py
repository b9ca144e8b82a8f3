"""Free memory of this host or container, and the host's identity. No torch, because ranks call it before they import torch."""

import contextlib
import hashlib
import itertools
import os
import socket
from pathlib import Path
from typing import Final

from llama_core.host import cgroups

_CGROUP_FILES: Final = (  # files with the limit and the use; which entries of memory.stat are file cache
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def available_host_bytes() -> int:
    """Memory that this process could still allocate: the machine's, or what the limits of its cgroups leave.

    Counts the file cache as free, because the kernel drops it on demand: loading has just filled it with the checkpoint.
    """
    try:
        meminfo = Path("/proc/meminfo").read_text()
        available = next(
            int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for folder, (limit, used, of_files) in itertools.product(cgroups.folders("memory"), _CGROUP_FILES):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            available = min(available, left + sum(int(stat.get(name, 0)) for name in of_files))
    return max(available, 0)


def host_identity() -> int:
    """A number below 2**63 that is equal for processes which share the memory of one host or container."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{boot.read_text() if boot.exists() else ''} {socket.gethostname()}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
