"""Starts and ends programs for benchmarks: any command, and our server as a user starts it.

`Program.end` leaves no process that the program started.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.common import REPOSITORY

PATIENCE_S = 10.0  # for processes that outlive the program that started them
_TAG = "LLAMA_BENCH_TAG"


class ProgramFailed(Exception):
    """A program ended, or was not ready in time. The message ends with the end of its output."""


def free_port() -> int:
    """A port of the loopback interface on which no process listens now.

    It lies outside the kernel's range of ephemeral ports, which Ray's processes take before the server binds its port.
    """
    while True:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


class Program:
    """A running command and all its descendants, which carry a tag in their environment."""

    def __init__(
        self, command: list[str], log: Path, env: dict[str, str] | None = None, cwd: Path = REPOSITORY
    ) -> None:
        """`env` is added to this process's environment. Output goes to the file `log`."""
        self.log = log
        self._tag = uuid.uuid4().hex
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=os.environ | (env or {}) | {_TAG: self._tag},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self, most: int = 3000) -> str:
        """The last characters of its output."""
        return self.log.read_text(errors="replace")[-most:]

    def processes(self) -> list[int]:
        """Ids of the running processes that carry the tag, the program itself included."""
        wanted, found = f"{_TAG}={self._tag}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has just ended, or belongs to another user
                if wanted in (entry / "environ").read_bytes().split(b"\0") and not _is_zombie(entry):
                    found.append(int(entry.name))
        return sorted(found)

    def wait_until_answers(self, url: str, timeout_s: float = 300.0, period_s: float = 0.1) -> float:
        """Wait until `url` answers 200; seconds from this call. Raises ProgramFailed."""
        begin = time.monotonic()
        while time.monotonic() - begin < timeout_s:
            if self.process.poll() is not None:
                raise ProgramFailed(f"ended with status {self.process.returncode}:\n{self.said()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
                if response.status == 200:
                    return time.monotonic() - begin
            time.sleep(period_s)
        raise ProgramFailed(f"{url} did not answer within {timeout_s:.0f} s:\n{self.said()}")

    def end(self, patience_s: float = 60.0) -> None:
        """Send SIGTERM, wait up to `patience_s`, then end every process that is left, at last by SIGKILL."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        deadline = time.monotonic() + PATIENCE_S
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
            time.sleep(0.2)
        self.process.wait()


def end_programs_on_sigterm() -> None:
    """Let SIGTERM leave every context as Ctrl-C does, so that started programs end too. For a command's main."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str] | None = None) -> Iterator[Program]:
    """Start a program; it has ended when the context is left."""
    with TemporaryDirectory(prefix="llama-bench-") as directory:
        program = Program(command, Path(directory) / "output", env)
        try:
            yield program
        finally:
            program.end()


@contextlib.contextmanager
def our_server(args: dict[str, Any], env: dict[str, str] | None = None) -> Iterator[tuple[Program, str]]:
    """Start our server as `make serve` does, on a free port, with `args` over serve_config.yaml's. Yields it and its URL.

    It may not be ready yet: `program.wait_until_answers(url + "/ready")`. It has a Ray cluster of its own.
    """
    port = free_port()
    with TemporaryDirectory(prefix="llama-bench-") as directory:
        config = write_config(Path(directory) / "serve_config.yaml", port, args)
        command = [sys.executable, "-m", "cli", "up", "-v", str(config)]
        with running(command, {"RAY_ADDRESS": "local"} | (env or {})) as program:
            yield program, f"http://127.0.0.1:{port}"


def write_config(path: Path, port: int, args: dict[str, Any], num_engines: int = 0) -> Path:
    """Write serve_config.yaml with another port and with `args` over its arguments. num_engines: behind a front; 0: the form of
    `build_app`."""
    import yaml  # missing in the environments of some peers

    config = yaml.safe_load((REPOSITORY / "serve_config.yaml").read_text())
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    (application,) = config["applications"]
    application["args"] |= args
    if num_engines:
        own = {name: application["args"].pop(name) for name in ("seed",) if name in application["args"]}
        front = {"import_path": "deployments.app:build_ingress", "args": own}
        engine: dict[str, Any] = {"name": "engine", "route_prefix": None, "import_path": "deployments.app:build_engine"}
        engine |= {"args": application["args"], "deployments": [{"name": "LlamaEngine", "num_replicas": num_engines}]}
        config["applications"] = [application | front, engine]
    path.write_text(yaml.safe_dump(config))
    return path


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
