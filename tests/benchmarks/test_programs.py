"""The end of programs that a benchmark starts."""

import sys
from pathlib import Path

import pytest

from benchmarks.harness.programs import Program
from tests.support.waiting import wait_until

# Starts a child in a session of its own that ignores SIGTERM, as faulty programs do.
STUBBORN = """
import subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
print("started", flush=True)
time.sleep(60)
"""


def test_every_descendant_of_a_program_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.programs.PATIENCE_S", 0.5)
    program = Program([sys.executable, "-c", STUBBORN], tmp_path / "output")
    wait_until("the program has a child", lambda: program.said().strip() == "started")
    # A process that is just being started has no environment, and so no tag, for a moment.
    wait_until("both processes carry the tag", lambda: len(program.processes()) == 2)
    program.end()
    assert program.processes() == []
