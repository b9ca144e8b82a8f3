"""Programs that a benchmark starts, and their end."""

import sys
from pathlib import Path

import pytest

from benchmarks.harness.programs import Program, ProgramFailed, free_port, running, write_config
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


def test_a_program_that_ends_before_it_answers_is_reported_with_its_output() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with (
        running([sys.executable, "-c", "print('no room'); raise SystemExit(7)"]) as program,
        pytest.raises(ProgramFailed, match=r"(?s)status 7.*no room"),
    ):
        program.wait_until_answers(url)


def test_a_program_that_never_answers_fails_at_the_timeout() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with (
        running([sys.executable, "-c", "import time; time.sleep(60)"]) as program,
        pytest.raises(ProgramFailed, match="did not answer"),
    ):
        program.wait_until_answers(url, timeout_s=0.3)


def test_our_servers_configuration_keeps_the_arguments_that_are_not_overridden(tmp_path: Path) -> None:
    text = write_config(tmp_path / "config.yaml", 12345, {"dtype": "float32"}).read_text()
    assert "port: 12345" in text
    assert "dtype: float32" in text
    assert "ckpt_dir: demo" in text
