"""Kills ranks from outside the server, and reads the footprint of its processes: memory, threads, descriptors."""

import asyncio
import contextlib
import os
import random
import re
import signal
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.support.server import Server
from tests.support.waiting import wait_until

READY_TIMEOUT_S = 120.0


def kill_a_rank(server: Server, draw: random.Random) -> int:
    """Kill a serving rank in any phase. Returns its number."""

    def killed() -> dict[str, Any] | None:
        if not (ranks := server.get("/props")[1].get("ranks")):
            return None
        chosen: dict[str, Any] = draw.choice(ranks)
        with contextlib.suppress(ProcessLookupError):  # an earlier fault has just ended it
            os.kill(chosen["pid"], signal.SIGKILL)
            return chosen
        return None

    return int(wait_until("a rank that the server names was killed", killed)["rank"])


def kill_any(server: Server, draw: random.Random) -> None:
    """Kill a process that is a rank, becomes one, or is on standby."""

    def is_killed() -> bool:
        found = [pid for pid, command in server.processes().items() if command.startswith("ray::RankWorker")]
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(draw.choice(found), signal.SIGKILL)
            return True
        return False

    wait_until("a process of a rank was killed", is_killed, pause_s=0.02)


async def ready(server: Server) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if (await asyncio.to_thread(server.get, "/ready"))[0] == 200:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError("the server does not recover:\n" + server.output()[-3000:])


def _field(name: str, status: str) -> int:
    """A number of /proc/PID/status: threads, or kilobytes. Raises ValueError where it is missing, as for a zombie."""
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    if found is None:
        raise ValueError(name)
    return int(found[1])


def footprint(server: Server) -> dict[str, float]:
    """Totals of all processes that last from start to end (the replica, Serve, Ray). Ray's log monitor keeps four
    files open for each dead worker, so its descriptors are counted apart.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for pid, command in server.processes().items():
        if "RankWorker" in command:
            total["ranks"] += 1
            continue
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            total["threads"] += _field("Threads", status)
            total["anonymous MB"] += _field("RssAnon", status) / 1024
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    is_socket = os.readlink(f"/proc/{pid}/fd/{descriptor}").startswith("socket:")
                    total["sockets" if is_socket else "descriptors"] += 1
            if "log_monitor" in command:
                monitored = len(os.listdir(f"/proc/{pid}/fd"))
                total["descriptors"] -= monitored
                total["log monitor's descriptors"] += monitored
        except (FileNotFoundError, ProcessLookupError, ValueError):
            continue
    total["shared memory files"] = len(os.listdir("/dev/shm"))
    return dict(total)


def leaks(before: dict[str, float], after: dict[str, float], num_ranks: int) -> list[str]:
    """Each resource that has grown too much by the end. `num_ranks` includes standby ranks."""
    most = {
        "ranks": num_ranks,
        "threads": before["threads"] + 10,
        "anonymous MB": before["anonymous MB"] * 1.1 + 50,
        "descriptors": before["descriptors"] + 50,
        "sockets": before["sockets"] + 50,
        "shared memory files": before["shared memory files"] + 2 * num_ranks,
    }
    return [
        f"{after[name]:g} {name}, at most {limit:g} were expected"
        for name, limit in most.items()
        if after[name] > limit
    ]


def spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        "count": len(values),
        "median": round(statistics.median(ordered), 3),
        "p99": round(p99, 3),
        "most": round(ordered[-1], 3),
    }
