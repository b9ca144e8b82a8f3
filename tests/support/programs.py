"""Runs commands, and programs of tests/programs, in processes of their own and reads what they print."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
# By default Serve kills a proxy that starts or answers late, which happens on a machine that other tests keep busy.
PATIENT_SERVE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}


def environment(**changes: str) -> dict[str, str]:
    """This process's variables without those of Ray and of the server, with this repository on the Python path."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "LLAMA_"))}
    return inherited | PATIENT_SERVE | {"PYTHONPATH": str(REPOSITORY)} | changes


def ended(
    command: list[str], env: dict[str, str] | None = None, timeout_s: float = 240.0
) -> "subprocess.CompletedProcess[str]":
    """A command that has ended, with its output. `env` is set in its environment."""
    variables = environment(**(env or {}))
    return subprocess.run(
        command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def output_of(command: list[str], env: dict[str, str] | None = None, timeout_s: float = 240.0) -> str:
    """What a command prints, which must end well. `env` is set in its environment."""
    done = ended(command, env, timeout_s)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def seen_by(module: str, *words: str, timeout_s: float = 240.0, **changes: str) -> dict[str, Any]:
    """The JSON that the program `module` prints after the word SEEN. `changes` are set in its environment."""
    finished = ended([sys.executable, "-m", module, *words], changes, timeout_s)
    lines = [line for line in finished.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, finished.stdout[-2000:] + finished.stderr[-8000:]
    seen: dict[str, Any] = json.loads(lines[0].removeprefix("SEEN "))
    return seen
