"""The no-op agent: replaces the raylet's dashboard agent, and waits until the raylet, its parent, ends.

    python -I -S noop_agent.py

The raylet ends when its agent does, so this process must outlive it. It imports only the standard library: 7 MB, one thread.
"""

import os
import time

CHECK_EVERY_S = 1.0


def is_raylet(pid: int) -> bool:
    """Whether the process is a raylet. True where /proc is missing."""
    try:
        with open(f"/proc/{pid}/comm") as name:
            return name.read().strip() == "raylet"
    except OSError:
        return not os.path.isdir("/proc/self")


if __name__ == "__main__":
    parent = os.getppid()
    while os.getppid() == parent and is_raylet(parent):
        time.sleep(CHECK_EVERY_S)
