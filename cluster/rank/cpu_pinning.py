"""Gives each rank CPU cores of its own. Knows nothing of Ray: all ranks in one network namespace of a host compete.

A rank claims a core by binding an abstract unix socket named after it. The kernel gives a name to one process and releases it
however that process ends, so no registry can become stale and nothing is on disk. All users of a host compete for the same
names, so two servers of two people get different cores too. Pods do not see each other's names, so a rank in a pod is pinned
only if the pod has CPUs of its own.
"""

import logging
import os
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from llama_core.host import cgroups

logger = logging.getLogger(__name__)

_CPUS: Final = Path("/sys/devices/system/cpu")


class CoreClaim:
    """`cores` stay claimed while this object and the process live."""

    def __init__(self, cores: tuple[int, ...], sockets: list[socket.socket]) -> None:
        self.cores = cores
        self._sockets = sockets

    def release(self) -> None:
        for claimed in self._sockets:
            claimed.close()
        self._sockets.clear()


def claim_cores(count: int, candidates: Iterable[int]) -> CoreClaim | None:
    """Claim the first `count` of `candidates` that no other rank on this host has; None, and nothing claimed, if too few are
    free."""
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
    """Pin every thread of this process to `count` claimed cores; None, and nothing changed, where pinning would harm.

    To be called before torch starts its threads, which inherit the affinity. Logs the reason and does nothing if too few cores
    are free, on systems without such calls, and where others use the same cores without seeing the claims: under a CPU quota,
    and in a Kubernetes pod that may use every CPU of its node.
    """
    if sys.platform != "linux":
        logger.info("cores=unpinned reason=no-affinity-call platform=%s", sys.platform)
        return None
    allowed = os.sched_getaffinity(0)
    quota = cgroups.cpu_quota()
    if quota is not None and quota < len(allowed):
        logger.info("cores=unpinned reason=cpu-quota quota_cpus=%.2f visible_cpus=%d", quota, len(allowed))
        return None
    if in_pod() and len(allowed) >= (os.cpu_count() or 1):
        logger.info("cores=unpinned reason=pod-without-cpuset visible_cpus=%d", len(allowed))
        return None
    claim = claim_cores(count, physical_cores_first(allowed))
    if claim is None:
        logger.warning("cores=unpinned reason=other-ranks-have-them wanted=%d visible_cpus=%d", count, len(allowed))
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
    """Whether this process runs in a Kubernetes pod; a node usually has several. Another container counts as a host."""
    return "KUBERNETES_SERVICE_HOST" in os.environ


def physical_cores_first(allowed: Iterable[int], cpus: Path = _CPUS) -> list[int]:
    """`allowed`, lowest first, but no core's second hyperthread before every core's first."""
    usable = set(allowed)
    return sorted(usable, key=lambda cpu: (sum(other < cpu for other in _siblings(cpu, cpus) & usable), cpu))


def _siblings(cpu: int, cpus: Path) -> set[int]:
    """CPUs of the same core, from the kernel's list ("0,64" or "0-1"); only `cpu` if the kernel has none."""
    siblings = {cpu}
    with suppress(OSError, ValueError):
        for part in (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().split(","):
            first, _, last = part.partition("-")
            siblings.update(range(int(first), int(last or first) + 1))
    return siblings
