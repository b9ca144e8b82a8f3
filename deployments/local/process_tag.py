"""Tags every process that `llama-ray up` starts, so that the command can end the processes that Ray leaves behind.

The tag is an environment variable whose value is unique to each command. Child processes inherit the variable, and
/proc shows the environment of every process of the same user.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

VARIABLE: Final = "LLAMA_PROCESS_TAG"
_LOOK_EVERY_S: Final = 0.1


def tagged_processes(tag: str) -> list[int]:
    """The process ids, other than the caller's, whose environment holds the tag."""
    wanted, found = f"{VARIABLE}={tag}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # the process has just ended, or belongs to another user
            continue
    return found


def end_tagged_processes(tag: str, terminate_for_s: float = 5.0) -> list[int]:
    """Send SIGTERM to tagged processes for `terminate_for_s`, then SIGKILL for as long. Returns the ids of all of them.

    HAProxy outlives Ray when Ray is stopped abruptly.
    """
    ended: list[int] = []
    deadline = time.monotonic() + terminate_for_s
    while (left := tagged_processes(tag)) and time.monotonic() < deadline + terminate_for_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        ended += [pid for pid in left if pid not in ended]
        time.sleep(_LOOK_EVERY_S)
    return ended


def has_raylet(tag: str) -> bool:
    """Whether one of the tagged processes is a raylet."""
    return any(b"/raylet\0" in _command_line(pid) for pid in tagged_processes(tag))


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the process has just ended
        return b""
