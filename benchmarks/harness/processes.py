"""What processes take: threads, memory, processor time. From Linux' /proc; knows nothing of what they do."""

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment. Resident memory counts a page that several share in each (rss) or by parts (pss)."""

    pid: int
    name: str
    threads: int
    rss_bytes: int
    pss_bytes: int
    peak_rss_bytes: int
    cpu_s: float  # its own, and that of children which it has waited for


def of_programs(roots: Iterable[int]) -> list[Process]:
    """These processes and all that descend from them, in the order of their ids."""
    found = []
    for pid in sorted(descendants(roots)):
        with contextlib.suppress(OSError, IndexError, KeyError):  # it has just ended
            found.append(_read(pid))
    return found


def descendants(roots: Iterable[int]) -> set[int]:
    """`roots` and all that came of them and still runs; what has lost its parent is not found."""
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
        peak_rss_bytes=max(status["VmHWM"], sums["Rss"]),  # the kernel counts the first of them less exactly
        cpu_s=sum(map(int, fields[11:15])) / _TICKS_PER_S,
    )


def _stat(pid: int) -> list[str]:
    """From the state on: proc(5) calls it field 3."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _sizes(pid: int, file: str) -> dict[str, int]:
    """Lines like "Rss:  1234 kB", in bytes."""
    text = Path(f"/proc/{pid}/{file}").read_text()
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _name(pid: int) -> str:
    """What it is, without paths and options: "raylet", "log_monitor.py", "cli", "ray::RankWorker"."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").strip("\0 ").split("\0")
    if words[0].startswith("ray::"):
        return words[0].split(".")[0].split(" ")[0]
    if Path(words[0]).name.startswith("python"):
        if "-m" in words:
            return words[words.index("-m") + 1]
        words = [word for word in words[1:] if not word.startswith("-")] or words
    return Path(words[0]).name[:40]
