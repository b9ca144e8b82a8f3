"""Ends a process and waits until it is gone. `ray.kill` returns at once, and Ray takes 5 s to end a stopped process."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.005
_DEAD: Final = "ZX"  # states of a thread that has ended


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process on one host. `started` is its start in clock ticks since boot, which tells it from a later process with the
    same pid; 0 where the system has no /proc.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """The process that has this pid now, on this host."""
        return cls(pid, _stat(Path(f"/proc/{pid}"))[1])


def is_running(process: ProcessIdentity) -> bool:
    """Whether the process still has threads, and with them memory and sockets. A stopped process is running; a zombie is gone,
    unless only its main thread has ended.
    """
    if process.started == 0:
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return False
        return True
    state, started = _stat(Path(f"/proc/{process.pid}"))
    if started != process.started:
        return False
    return state not in _DEAD or _has_living_thread(process.pid)


def end_process(process: ProcessIdentity, patience_s: float, timeout_s: float) -> bool:
    """Give the process `patience_s` to end by itself, then SIGKILL. Returns whether it is gone within `timeout_s` more. Blocks;
    for processes of this host.
    """
    if _wait_gone(process, patience_s):
        return True
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    return _wait_gone(process, timeout_s)


def _wait_gone(process: ProcessIdentity, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_running(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _has_living_thread(pid: int) -> bool:
    """The state of a process in /proc is that of its main thread, which may end before the others."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    return any(_stat(thread)[0] not in _DEAD for thread in threads)


def _stat(path: Path) -> tuple[str, int]:
    """State letter and start time of a process or a thread from its folder in /proc; ("X", 0) if it is gone."""
    try:
        text = (path / "stat").read_text()
    except OSError:
        return "X", 0
    fields = text[text.rindex(")") + 2 :].split()  # the command's name before it may contain any character
    return fields[0], int(fields[19])
