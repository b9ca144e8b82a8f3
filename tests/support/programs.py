"""Tests run some things as programs of their own: in an environment of their own, with one line of JSON for an answer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def environment(**changes: str) -> dict[str, str]:
    """This process's variables without those that steer Ray or the server; programs in it find this repository."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "LLAMA_"))}
    return inherited | {"PYTHONPATH": str(REPOSITORY)} | changes


def seen_by(module: str, timeout_s: float = 240.0, **changes: str) -> dict[str, Any]:
    """What the program `module` of these tests, with `changes` in its environment, prints after the word SEEN."""
    finished = subprocess.run(
        [sys.executable, "-m", module],
        cwd=REPOSITORY,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, finished.stdout[-2000:] + finished.stderr[-8000:]
    seen: dict[str, Any] = json.loads(lines[0].removeprefix("SEEN "))
    return seen
