"""The terminal and the log file of `llama-ray up`."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.local.console import Console
from tests.support.programs import REPOSITORY, environment

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from deployments.local.console import Console
log = Path(sys.argv[1]) if len(sys.argv) > 1 else None
console = Console(log)
console.phase("Ray started")
console.phase("Ray started")
print("a line of Serve")
os.system("echo a line of HAProxy >&2")
console.show("the banner")
console.event("Draining")
assert log is None or console.end_of_log(1) == "Draining"
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )


def test_the_terminal_shows_the_consoles_lines_and_the_log_file_shows_all(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    done = run(str(log))
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and lines[0].endswith("s  Ray started") and lines[1] == "the banner"
    assert done.stderr.splitlines() == ["Draining"]
    logged = log.read_text()
    for line in ("Ray started", "a line of Serve", "a line of HAProxy", "the banner", "Draining"):
        assert logged.count(line) == 1
    assert log.stat().st_mode & 0o077 == 0, "other users cannot read it"


def test_a_full_disk_leaves_the_terminal_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = Console(None)
    console.log = Path("up.log")
    monkeypatch.setattr(console, "_out", shown)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        console.show("the banner")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert shown.getvalue() == "the banner\n"
