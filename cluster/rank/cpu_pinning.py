"""Gives each rank CPU cores of its own. Knows nothing of Ray: whoever runs on this host under this network namespace
competes.

A core is claimed by binding an abstract unix socket named after it. The kernel lets one process have a name and frees
it at that process's end, however it ends, so there is no registry to go stale and nothing on disk. All users of a
host compete for the same names: two servers of two people get different cores too. Pods do not see each other's names,
so in one nothing is pinned unless it was given CPUs of its own.
"""

import logging
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")
_CPUS: Final = Path("/sys/devices/system/cpu")


class CoreClaim:
    """`cores` are ours while this object, or the process, lives."""

    def __init__(self, cores: tuple[int, ...], sockets: list[socket.socket]) -> None:
        self.cores = cores
        self._sockets = sockets

    def release(self) -> None:
        for claimed in self._sockets:
            claimed.close()
        self._sockets.clear()


def claim_cores(count: int, candidates: Iterable[int]) -> CoreClaim | None:
    """The first `count` of `candidates` that no other rank on this host has; None (and none kept) if too few are free."""
    cores: list[int] = []
    sockets: list[socket.socket] = []
    for core in candidates:
        if len(cores) == count:
            break
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0llama-rank-core-{core}")
        except OSError:
            name.close()
            continue
        cores.append(core)
        sockets.append(name)
    claim = CoreClaim(tuple(cores), sockets)
    if len(cores) == count:
        return claim
    claim.release()
    return None


def pin_process(count: int) -> CoreClaim | None:
    """Pins every thread of this process to `count` claimed cores; None, and nothing changed, where that cannot be
    done well.

    Call it before torch starts its threads: they inherit the affinity. Not done (with a log line) when too few cores
    are free, on systems without such calls, and where the core numbers are the host's and shared with others that
    cannot see our claims: under a CPU quota, and in a Kubernetes pod that may use every CPU of its node.
    """
    if sys.platform != "linux":
        logger.info("cores=unpinned reason=no-affinity-call platform=%s", sys.platform)
        return None
    allowed = os.sched_getaffinity(0)
    quota = cpu_quota(_CPU_MAX)
    if quota is not None and quota < len(allowed):
        logger.info("cores=unpinned reason=cpu-quota quota_cpus=%.2f visible_cpus=%d", quota, len(allowed))
        return None
    if in_pod() and len(allowed) >= (os.cpu_count() or 1):
        logger.info("cores=unpinned reason=pod-without-cpuset visible_cpus=%d", len(allowed))
        return None
    claim = claim_cores(count, physical_cores_first(allowed))
    if claim is None:
        logger.warning("cores=unpinned reason=too-few-free wanted=%d visible_cpus=%d", count, len(allowed))
        return None
    try:
        os.sched_setaffinity(0, claim.cores)
    except OSError as error:
        logger.warning("cores=unpinned reason=%s", error)
        claim.release()
        return None
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread that has ended since the listing
            os.sched_setaffinity(int(thread), claim.cores)
    logger.info("cores=%s", ",".join(map(str, claim.cores)))
    return claim


def in_pod() -> bool:
    """Whether this is one of Kubernetes' pods, of which a node usually has several. A lone container is like a host."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def physical_cores_first(allowed: Iterable[int], cpus: Path = _CPUS) -> list[int]:
    """`allowed`, lowest first, but no core's second hyperthread before every core's first."""
    usable = set(allowed)
    return sorted(usable, key=lambda cpu: (sum(other < cpu for other in _siblings(cpu, cpus) & usable), cpu))


def _siblings(cpu: int, cpus: Path) -> set[int]:
    """CPUs of the same core, from the kernel's list ("0,64" or "0-1"); `cpu` alone where it does not tell."""
    siblings = {cpu}
    with suppress(OSError, ValueError):
        for part in (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().split(","):
            first, _, last = part.partition("-")
            siblings.update(range(int(first), int(last or first) + 1))
    return siblings


def cpu_quota(cpu_max: Path) -> float | None:
    """CPUs that this cgroup may use, from the file's "quota period" in microseconds; None for no limit or no such
    file.
    """
    try:
        quota, period = cpu_max.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
