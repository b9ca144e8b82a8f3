"""The terminal and the log file of `llama-ray up`."""

import subprocess
import sys
from pathlib import Path

import pytest

from deployments.local.console import LOG_DIR_VARIABLE, NUM_LOGS_KEPT, new_log_file, remove_old_logs
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


def test_verbose_output_stays_on_the_terminal() -> None:
    done = run()
    assert "a line of Serve" in done.stdout and "a line of HAProxy" in done.stderr


def test_only_the_newest_logs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_DIR_VARIABLE, str(tmp_path / "logs"))
    (tmp_path / "logs").mkdir()
    for day in range(10, 25):
        (tmp_path / "logs" / f"up-202501{day}-120000-1.log").touch()
    (tmp_path / "logs" / "notes.txt").touch()
    newest = new_log_file()
    left = sorted(path.name for path in (tmp_path / "logs").glob("up-*"))
    assert len(left) == NUM_LOGS_KEPT and left[-1] == newest.name and left[0] == "up-20250116-120000-1.log"
    assert (tmp_path / "logs" / "notes.txt").exists(), "another file stays"
    remove_old_logs(tmp_path / "logs", num_kept=1)
    assert [path.name for path in (tmp_path / "logs").glob("up-*")] == [newest.name]


def test_a_directory_that_cannot_be_made_does_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(LOG_DIR_VARIABLE, str(tmp_path / "file" / "logs"))
    assert new_log_file().exists()
