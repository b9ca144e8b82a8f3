"""The limits of this process's cgroup (versions 1 and 2) and of all its parents: of a container, a pod or a service."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# Version 2's file has "QUOTA PERIOD", version 1 has two.
_QUOTAS = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def folders(controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of its parents, in version 2's hierarchy and in version 1's of the controller.

    Some may not exist: in a container, OWN may have the path that the host sees.
    """
    for line in OWN.read_text().splitlines() if OWN.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = MOUNT / controller if controllers else MOUNT
            folder = top / path.strip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def cpu_quota() -> float | None:
    """CPUs that the smallest quota allows; None without a quota."""
    found: list[float] = []
    for folder in folders("cpu"):
        for names in _QUOTAS:
            with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
                quota, period = " ".join((folder / name).read_text() for name in names).split()
                found += [int(quota) / int(period)] if int(quota) > 0 else []  # version 1 has -1 for no quota
    return min(found, default=None)


def usable_cpus() -> int:
    """Whole CPUs that this process may keep busy: of its affinity, which a cpuset limits, and of its quota. At least one."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota() or math.inf)))
