"""Threads, memory and processor time of processes, from Linux' /proc."""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment. Resident memory counts a shared page in each process (rss) or divided among them (pss)."""

    pid: int
    name: str
    threads: int
    rss_bytes: int
    pss_bytes: int
    peak_rss_bytes: int
    cpu_s: float  # including children that have ended


def of_programs(roots: Iterable[int]) -> list[Process]:
    """These processes and all their descendants, by process id."""
    found = []
    for pid in sorted(descendants(roots)):
        with contextlib.suppress(OSError, IndexError, KeyError):  # the process has just ended
            found.append(_read(pid))
    return found


def descendants(roots: Iterable[int]) -> set[int]:
    """`roots` and their running descendants. A process whose parent has ended is not found."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = _stat(int(entry.name))
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, ahead = set(), list(roots)
    while ahead:
        pid = ahead.pop()
        if pid not in found:
            found.add(pid)
            ahead += children.get(pid, [])
    return found


def _read(pid: int) -> Process:
    fields, status, sums = _stat(pid), _sizes(pid, "status"), _sizes(pid, "smaps_rollup")
    return Process(
        pid=pid,
        name=_name(pid),
        threads=int(fields[17]),
        rss_bytes=sums["Rss"],
        pss_bytes=sums["Pss"],
        peak_rss_bytes=max(status["VmHWM"], sums["Rss"]),  # the kernel's VmHWM is less exact
        cpu_s=sum(map(int, fields[11:15])) / _TICKS_PER_S,
    )


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from field 3 of proc(5), the state, on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _sizes(pid: int, file: str) -> dict[str, int]:
    """Lines like "Rss:  1234 kB", in bytes."""
    text = Path(f"/proc/{pid}/{file}").read_text()
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _name(pid: int) -> str:
    """A short name without paths and options: "raylet", "log_monitor.py", "cli", "ray::RankWorker"."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").strip("\0 ").split("\0")
    if words[0].startswith("ray::"):
        return words[0].split(".")[0].split(" ")[0]
    if Path(words[0]).name.startswith("python"):
        if "-m" in words:
            return words[words.index("-m") + 1]
        words = [word for word in words[1:] if not word.startswith("-")] or words
    return Path(words[0]).name[:40]
