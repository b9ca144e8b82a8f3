"""The directory of what this project keeps between starts: the compiled engine, and records and files of remote models."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from llama_core.errors import ConfigError


def cache_dir() -> Path:
    """A directory that only this user can write to, because processes load code from it. Raises ConfigError without one.

    LLAMA_CACHE_DIR names it; else it is llama-ray in the user's cache directory, or in the temporary one.
    """
    for directory in _candidates():
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.lstat()  # not stat: somebody could change a link after this check
        except OSError:
            continue
        if (
            stat.S_ISDIR(status.st_mode)
            and status.st_uid == os.getuid()
            and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            and os.access(directory, os.W_OK)
        ):
            return directory
    raise ConfigError("there is no cache directory that belongs to this user alone; LLAMA_CACHE_DIR names one")


def _candidates() -> Iterator[Path]:
    if named := os.environ.get("LLAMA_CACHE_DIR"):
        yield Path(named).resolve()
        return
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llama-ray"
    yield Path(tempfile.gettempdir()) / f"llama-ray-{os.getuid()}"
