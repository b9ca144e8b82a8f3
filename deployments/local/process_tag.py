"""Tags every process that `llama-ray up` starts, and ends the tagged processes, also where the command itself is killed.

The tag is an environment variable whose value is unique to each command. Child processes inherit the variable, and
/proc shows the environment of every process of the same user.

    python -I -S process_tag.py TAG DIRECTORY

is the watcher: it waits until its standard input ends, ends all processes with the tag, and removes the directory. It imports
only the standard library.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

VARIABLE: Final = "LLAMA_PROCESS_TAG"
_LOOK_EVERY_S: Final = 0.1


def start_watcher(tag: str, directory: str) -> None:
    """Start a process that ends the tagged processes when this one has ended, however it ends, and removes the directory.

    To be called before the variable is set here. The watcher has a session of its own, so Ctrl-C does not reach it.
    """
    reading, _ = os.pipe()  # the kernel closes the other end, which no child inherits, with this process
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, tag, directory],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    os.close(reading)


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


def end_tagged_processes(tag: str, terminate_for_s: float = 1.0, kill_for_s: float = 10.0) -> None:
    """Send SIGTERM to tagged processes for `terminate_for_s`, then SIGKILL until all have ended, or for `kill_for_s`.

    Some of Ray's ignore SIGTERM, and HAProxy may outlive Ray.
    """
    kill_after = time.monotonic() + terminate_for_s
    while (left := tagged_processes(tag)) and time.monotonic() < kill_after + kill_for_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM if time.monotonic() < kill_after else signal.SIGKILL)
        time.sleep(_LOOK_EVERY_S)


def raylet_of(tag: str) -> int | None:
    """The process id of the tagged raylet."""
    return next((pid for pid in tagged_processes(tag) if b"/raylet\0" in _command_line(pid)), None)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the process has just ended
        return b""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager may send it to all processes of the service
    sys.stdin.buffer.read()
    end_tagged_processes(sys.argv[1])
    shutil.rmtree(sys.argv[2], ignore_errors=True)
