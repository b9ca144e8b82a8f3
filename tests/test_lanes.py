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


MEETING = """
import pathlib, sys, time
print(time.time())
here, mine, *others = map(pathlib.Path, sys.argv[1:])
(here / mine).touch()
for _ in range(2000):
    if all((here / other).exists() for other in others):
        break
    time.sleep(0.05)
else:
    raise SystemExit(f"{others} have not begun")
print(time.time())
"""


def meeting(name: str, tmp_path: Path, *others: str) -> Lane:
    """A lane that ends when the lanes `others` have begun."""
    (tmp_path / "begun").mkdir(exist_ok=True)
    command = (sys.executable, "-c", MEETING, str(tmp_path / "begun"), name, *others)
    return Lane(name, [command], tmp_path / name)


def times_of(*ran: Lane) -> list[tuple[float, float]]:
    """When each of these lanes, which must have ended well, began and ended."""
    assert all(one.status == 0 for one in ran), [one.text for one in ran]
    return [(float(began), float(ended)) for began, ended in (one.text.split() for one in ran)]


def test_lanes_that_compute_run_one_at_a_time_beside_others(tmp_path: Path) -> None:
    computing = [meeting(f"computing {i}", tmp_path) for i in range(2)]
    waiting = [meeting(f"waiting {i}", tmp_path, *["computing 1"] * (i < 2)) for i in range(3)]
    run_lanes([], computing, waiting, threading.Event(), 3)
    (one_began, one_ended), (other_began, _), *_ = times_of(*computing, *waiting)
    assert one_ended < other_began
    assert computing[0].seconds >= one_ended - one_began


def test_another_lane_that_computes_runs_once_the_last_that_waits_has_begun(tmp_path: Path) -> None:
    names = ["computing 0", "computing 1", "waiting"]
    *computing, waiting = (meeting(name, tmp_path, *names) for name in names)
    run_lanes([], computing, [waiting], threading.Event(), 2)
    times_of(*computing, waiting)


def test_beside_the_first_lane_the_last_ones_that_compute_run_too(tmp_path: Path) -> None:
    first = meeting("first", tmp_path, "computing 1")
    computing = [meeting(f"computing {i}", tmp_path, *["computing 1"] * (i == 0)) for i in range(3)]
    waiting = [meeting(f"waiting {i}", tmp_path) for i in range(2)]
    run_lanes([first], computing, waiting, threading.Event(), 3)
    (_, first_ended), _, middle, last, *others = times_of(first, *computing, *waiting)
    assert last[1] < middle[0]
    assert all(first_ended < began for began, _ in others), "lanes of servers wait for the first one"


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
    time.sleep(1)
    print("cleaned up")
'''
lanes.COMMANDS = {{}}
names = ("chaos", "model", "unit", "measures", "lint")
lanes.commands = lambda extra: {{name: [(sys.executable, "-c", clean, name)] for name in names}}
lanes.report = lambda lane: print(lane.name, lane.text, flush=True)
lanes.main(["--lanes", *names])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True
    )
    wait_until("four lanes' commands run", lambda: len(list(tmp_path.iterdir())) == 4)
    os.kill(process.pid, signal.SIGINT)
    assert process.stderr is not None and "the lanes end their servers" in process.stderr.readline()
    os.kill(process.pid, signal.SIGINT)  # an impatient user's second one
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert output.count("cleaned up") == 4
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
