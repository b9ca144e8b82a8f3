"""Makes sure that a process is gone. `ray.kill` alone takes 5 s for a stopped process, and returns at once for any."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process on one host. `started` is its start in clock ticks since boot, so that a reused pid is not mistaken
    for it; 0 where the system has no /proc.
    """

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """That of the process that has this pid now, on this host."""
        return cls(pid, _stat(pid)[1])


def is_running(process: ProcessIdentity) -> bool:
    """Whether it still has memory, threads and sockets: a zombie has none and counts as gone. Stopped is running."""
    if process.started == 0:
        try:
            os.kill(process.pid, 0)
        except ProcessLookupError:
            return False
        return True
    state, started = _stat(process.pid)
    return started == process.started and state not in "ZX"


def end_process(process: ProcessIdentity, patience_s: float, timeout_s: float) -> bool:
    """Gives it `patience_s` to go by itself, then SIGKILL; whether it is gone within `timeout_s` more. Blocks; own
    host only.
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


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time; ("X", 0) if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "X", 0
    fields = text[text.rindex(")") + 2 :].split()  # the command's name before it may hold anything
    return fields[0], int(fields[19])
