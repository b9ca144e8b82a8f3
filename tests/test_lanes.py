"""The lanes of `python -m tests`: every test file has one, and a failed lane is reported."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import __main__ as lanes
from tests.__main__ import COMPUTING, FIRST, LANE_OF_PATH, ROOT, WAITING, Lane, files_by_lane, lane_of, run_lanes, total
from tests.support.waiting import wait_until


def lane(name: str, tmp_path: Path, code: str) -> Lane:
    return Lane(name, [(sys.executable, "-c", code)], tmp_path / name)


def test_every_test_file_has_one_lane_and_every_lane_runs() -> None:
    names = (*FIRST, *COMPUTING, *WAITING)
    assert set(files_by_lane()) | set(lanes.COMMANDS) == set(names) and len(names) == len(set(names))
    assert lanes.by_default(names, ["--full"]) == list(names)
    assert set(names) - set(lanes.by_default(names, [])) == {"soak"}
    listed = [file for files in files_by_lane().values() for file in files]
    assert sorted(listed) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    assert all((ROOT / path).exists() for path in LANE_OF_PATH)
    assert lane_of("tests/cluster/driver/test_two_nodes.py") == "nodes"
    assert lane_of("tests/cluster/driver/test_fan_out.py") == "ranks"
    assert lane_of("tests/test_rooms.py") == "unit"


def test_lanes_that_compute_run_one_at_a_time_beside_others(tmp_path: Path) -> None:
    code = "import time; print(time.time()); time.sleep(0.3); print(time.time())"
    codes = (code.replace("0.3", "1.5"), code, code)
    computing = [lane(f"computing {i}", tmp_path, each) for i, each in enumerate(codes)]
    waiting = [lane(f"waiting {i}", tmp_path, code) for i in range(2)]
    first = [lane("first", tmp_path, code.replace("0.3", "1.5"))]
    run_lanes(first, computing, waiting, threading.Event(), 3)
    times = {one.name: tuple(map(float, one.text.split())) for one in (*first, *computing, *waiting)}
    assert times["computing 0"][1] < times["computing 1"][0]
    assert times["computing 2"][0] < times["computing 0"][1], "the last of them runs beside the first lane too"
    assert all(times["first"][1] < times[one.name][0] for one in waiting), "lanes of servers wait for the first one"
    assert all(one.status == 0 and one.seconds >= 0.3 for one in (*first, *computing, *waiting))


def test_a_lane_that_fails_is_reported_with_its_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = lane("good", tmp_path, "print('3 passed, 1 skipped in 2.50s')")
    bad = lane("bad", tmp_path, "print('the reason\\n= 1 failed, 2 passed in 1.00s ='); raise SystemExit(1)")
    skipped = Lane("chain", [*bad.commands, (sys.executable, "-c", "print('never')")], tmp_path / "chain")
    run_lanes([], [good, bad, skipped], [], threading.Event(), 2)
    shown = capsys.readouterr().out
    assert "the reason" in shown and "never" not in shown
    assert total([good, bad], 3.5) == "1 failed, 5 passed, 1 skipped in 4s; failed lanes: bad"


def test_a_command_that_does_not_exist_fails_its_lane(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = Lane("lint", [(str(tmp_path / "clang-format"),)], tmp_path / "lint")
    run_lanes([], [missing], [], threading.Event(), 2)
    assert "clang-format: " in capsys.readouterr().out and missing.status == 127


def test_ctrl_c_lets_a_lane_clean_up_and_starts_no_other(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests import __main__ as lanes
clean = '''
import sys, time
from pathlib import Path
try:
    Path({str(tmp_path)!r}, sys.argv[1]).touch()
    time.sleep(300)
except KeyboardInterrupt:
    print("cleaned up")
'''
lanes.COMMANDS = {{}}
names = ("chaos", "model", "unit", "lint")
lanes.commands = lambda extra: {{name: [(sys.executable, "-c", clean, name)] for name in names}}
lanes.report = lambda lane: print(lane.name, lane.text, flush=True)
lanes.main(["--lanes", *names])
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    wait_until("three lanes' commands run", lambda: len(list(tmp_path.iterdir())) == 3)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert output.count("cleaned up") == 3
    assert not (tmp_path / "lint").exists() and "lint" not in output


def test_a_lane_that_computes_leaves_servers_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = []
    monkeypatch.setattr("os.getpriority", lambda which, who: 4)
    monkeypatch.setattr("os.setpriority", lambda which, who, niceness: changed.append((who, niceness)))
    patient, urgent = lane("patient", tmp_path, "pass"), lane("urgent", tmp_path, "pass")
    patient.niceness = lanes.NICENESS
    run_lanes([], [patient, urgent], [], threading.Event(), 2)
    assert patient.process is not None
    assert changed == [(patient.process.pid, lanes.NICENESS)], "the other keeps the niceness of the program"
