"""A private directory for a unix socket or another file of the ranks, and the removal of directories whose owners have ended.

The owner holds a lock on its directory (`flock`), which the kernel releases however the process ends: a directory that can be
locked has no owner. This also works in containers that share /tmp, where process ids say nothing about the owner.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "llama-ranks-"
_MAX_PATH_BYTES: Final = 100  # sun_path holds 108 on Linux, 104 on macOS


class SocketDir:
    """A directory that only this user can enter, until `remove()`."""

    def __init__(self) -> None:
        remove_stale(parent_dir())
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent_dir()))  # mode 0700
            try:
                self._lock = os.open(self.path, os.O_RDONLY)
            except FileNotFoundError:  # another process removed it between creation and lock
                continue
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                break
            os.close(self._lock)

    @property
    def socket_path(self) -> str:
        return str(self.path / "steps.sock")

    def remove(self) -> None:
        """Idempotent."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def parent_dir() -> Path:
    """The temporary directory, or /tmp if its path is too long for the address of a unix socket."""
    preferred = Path(tempfile.gettempdir())
    longest = preferred / (PREFIX + "12345678") / "steps.sock"
    return preferred if len(os.fsencode(longest)) <= _MAX_PATH_BYTES else Path("/tmp")


def remove_stale(parent: Path) -> int:
    """Remove this user's directories without an owner; returns their number."""
    num_removed = 0
    for path in parent.glob(PREFIX + "*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            num_removed += 1
        except OSError:
            pass  # its owner is alive
        finally:
            with suppress(OSError):
                os.close(lock)
    return num_removed
