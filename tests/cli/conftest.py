"""A scripted server, and the command as a user runs it."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from queue import Queue
from threading import Thread
from typing import Any

import pytest

from tests.support.forking import fork_server
from tests.support.programs import REPOSITORY, environment

MODULES = ("torch", "cli.main", "cli.estimate", "cli.chat")
COMMAND = "from cli.main import main; main()"


class ScriptedServer:
    """`tests.cli.scripted_server` in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.cli.scripted_server"]
        self._process = subprocess.Popen(command, cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self._lines: Queue[str] = Queue()
        Thread(target=self._read, daemon=True).start()

    def next_request(self) -> dict[str, Any]:
        """The next request's path, bearer and body; {"cancelled": True} when a client left a stream."""
        found: dict[str, Any] = json.loads(self._lines.get(timeout=60))
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    try:
        yield server
    finally:
        server.end()


def llama_ray(
    *words: str, stdin: str = "", env: dict[str, str] | None = None, timeout_s: float = 120
) -> "subprocess.CompletedProcess[str]":
    """Run the command. Its history goes nowhere."""
    given = environment(**{"LLAMA_RAY_HISTORY": "", "COLUMNS": "200", "NO_COLOR": "1"} | (env or {}))
    return fork_server(MODULES).run(COMMAND, ["llama-ray", *words], given, stdin=stdin, timeout_s=timeout_s)


def on_one_line(text: str | Sequence[str]) -> str:
    """Text without the line breaks and borders of rich's boxes."""
    return " ".join("".join(text).replace("│", " ").split())
