"""A process of a lower priority that answers JSON messages over a pipe, for work that would delay the process beside it.

It starts with the first message, ends when none has come for a while, and ends with the process that started it. One that was
killed is replaced by the next start.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final

_NICENESS: Final = 10
_LONGEST_TRANSFER_S: Final = 30.0  # without a byte, in the middle of a message


class JsonProcess:
    """The side that asks. module: its `main(fd)` answers (`asked_over`). Methods raise OSError or EOFError where the process
    has ended, or has read or written nothing for 30 s in the middle of a message."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """None while there is no process."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started; it may have ended since."""
        return self._connection is not None

    def start(self) -> None:
        ours, theirs = Pipe()
        _bound_transfers(ours)
        # -P: no module of the current folder.
        command = [sys.executable, "-P", "-c", f"from {self._module} import main; main({theirs.fileno()})"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(_module_path()), "RAYON_NUM_THREADS": "1"}
        with theirs:
            self._connection = ours
            process = self._process = subprocess.Popen(
                command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, close_fds=True
            )
        # Reads the exit status of a process that ends by itself, which would stay a zombie until the next start.
        try:
            threading.Thread(target=process.wait, name="json-process-end", daemon=True).start()
        except RuntimeError as error:  # a limit of threads
            raise OSError(str(error)) from None

    def send(self, message: dict[str, Any]) -> None:
        send(self._open(), message)

    def has_answer(self, longest_s: float) -> bool:
        """Wait for an answer, or for the end of the process."""
        return self._open().poll(longest_s)

    def answer(self) -> Any:
        return json.loads(self._open().recv_bytes())

    def answered_bytes(self) -> bytes:
        return self._open().recv_bytes()

    def kill(self) -> None:
        """Kill the process, so that a thread that waits for its answer gets EOFError and calls `end`."""
        if (process := self._process) is not None:
            process.kill()

    def end(self) -> int | None:
        """Kill the process. Its exit status: where it had ended before, that of its own end, negative for a signal."""
        connection, process = self._connection, self._process
        self._connection = self._process = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        process.kill()
        return process.wait()

    def _open(self) -> Connection:
        if self._connection is None:
            raise EOFError("the process has ended")
        return self._connection


def _module_path() -> list[str]:
    """`sys.path` with the standard library first, because Ray puts the folder in which the server was started before it."""
    library = sysconfig.get_path("stdlib")
    own = (library, os.path.join(library, "lib-dynload"))
    return sorted(filter(None, sys.path), key=lambda path: path not in own)


def _bound_transfers(connection: Connection) -> None:
    """Make a send, or the rest of an answer, raise BlockingIOError rather than wait for ever for a stopped process."""
    longest = struct.pack("ll", int(_LONGEST_TRANSFER_S), 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, longest)


@contextlib.contextmanager
def asked_over(fd: int) -> Iterator[Connection]:
    """The process's side: its connection, until the other side has ended."""
    # Ctrl-C reaches every process of the terminal; the end of the process that asks ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    _silence_libraries()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    with Connection(fd) as connection, contextlib.suppress(OSError, EOFError):
        yield connection


def _silence_libraries() -> None:
    """Drop what native libraries write to standard error, as Rust does where there is no memory. Python's messages stay."""
    with contextlib.suppress(OSError):  # it is closed
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)


def send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())
