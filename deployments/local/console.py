"""The output of `llama-ray up`: its own lines on the terminal, everything else in a log file.

Ray, Serve and HAProxy write about 40 lines before a server is ready. Console redirects the process's standard output and
standard error to a log file, and keeps the terminal for one line a phase, the banner, and one line for each event that matters.
"""

import contextlib
import os
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Final, TextIO

LOG_DIR_VARIABLE: Final = "LLAMA_LOG_DIR"
NUM_LOGS_KEPT: Final = 10
_PATTERN: Final = "up-*.log"


class Console:
    """Writes lines to the terminal and to the log file."""

    def __init__(self, log: Path | None) -> None:
        """log: redirect standard output and standard error there; None leaves both on the terminal."""
        self.log = log
        self._begin_s = time.monotonic()
        self._phases: set[str] = set()
        self._out, self._err = _duplicate(1), _duplicate(2)
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(line_buffering=True)

    def phase(self, name: str) -> None:
        """Report that a phase of the start is reached, once for each name."""
        if name not in self._phases:
            self._phases.add(name)
            self._write(self._out, f"  {time.monotonic() - self._begin_s:5.1f} s  {name}")

    def show(self, text: str) -> None:
        """Write to standard output: the banner."""
        self._write(self._out, text)

    def event(self, text: str) -> None:
        """Write one line to standard error: a failure, a recovery, a shutdown."""
        self._write(self._err, text)

    def end_of_log(self, num_lines: int = 15) -> str:
        """The last lines of the log file; empty if there is none."""
        if self.log is None:
            return ""
        sys.stdout.flush()
        sys.stderr.flush()
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def _write(self, terminal: TextIO, text: str) -> None:
        for stream in (sys.stdout, terminal) if self.log is not None else (terminal,):
            with contextlib.suppress(OSError):  # the terminal is closed, or the disk full; the server continues
                print(text, file=stream, flush=True)


def new_log_file() -> Path:
    """A path for this command's log file, in LLAMA_LOG_DIR or the user's state directory. Removes all but the newest logs."""
    default = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "llama-ray" / "logs"
    directory = Path(os.environ.get(LOG_DIR_VARIABLE) or default)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = directory / f"up-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
        log.touch(mode=0o600)
    except OSError:  # a read-only home directory
        directory = Path(tempfile.mkdtemp(prefix="llama-ray-"))
        log = directory / f"up-{os.getpid()}.log"
        log.touch(mode=0o600)
    remove_old_logs(directory)
    return log


def remove_old_logs(directory: Path, num_kept: int = NUM_LOGS_KEPT) -> None:
    """Remove all but the `num_kept` newest logs, by the time in their names."""
    for old in sorted(directory.glob(_PATTERN), key=lambda path: path.name)[:-num_kept]:
        old.unlink(missing_ok=True)


def _duplicate(descriptor: int) -> TextIO:
    """A stream to where `descriptor` leads now. Child processes do not inherit it."""
    return os.fdopen(os.dup(descriptor), "w", buffering=1, encoding="utf-8", errors="replace")
