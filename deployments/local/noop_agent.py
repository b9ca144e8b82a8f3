"""In the place of an agent of Ray's raylet that nobody needs: does nothing until the raylet, its parent, has ended.

    python -I -S noop_agent.py

The raylet ends when its agent does, so this must outlive it. Nothing but the standard library is read: 7 MB, one thread.
"""

import os
import time

CHECK_EVERY_S = 1.0


def is_raylet(pid: int) -> bool:
    """Whether it is one, for all that can be seen: the raylet may have ended before this process looked."""
    try:
        with open(f"/proc/{pid}/comm") as name:
            return name.read().strip() == "raylet"
    except OSError:
        return not os.path.isdir("/proc/self")


if __name__ == "__main__":
    parent = os.getppid()
    while os.getppid() == parent and is_raylet(parent):
        time.sleep(CHECK_EVERY_S)
