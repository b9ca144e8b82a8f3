"""Runs the sections one after another, each in a process of its own and within its time, and goes on where it was cut.

What a section has measured is kept when it is cut, fails, or takes the device down with it. Imports no torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.plan import Section
from benchmarks.gpu.recorder import new_state, read_state, write_state
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY

# Ends a section: (name, its state file, seconds) -> whether it ended by itself.
Launch = Callable[[str, Path, float], bool]
_DESCRIBE_S: Final = 120.0
_LET_END_S: Final = 10.0  # after SIGTERM, for what the section started
_LEAST_S: Final = 5.0  # a section is not started with less
FINISHED: Final = ("done", "unavailable")


class CannotRun(Exception):
    """No section can run, for the reason given."""


def run_sections(
    sections: Iterable[Section], states: Path, total_s: float, launch: Launch, begin: float | None = None
) -> dict[str, dict[str, Any]]:
    """Run the sections that are not finished. The state of each, whether it ran now or before.

    states: the folder of their files. total_s: for all of them, from `begin` (`time.monotonic`).
    """
    begin = time.monotonic() if begin is None else begin
    found = {}
    for section in sections:
        path = states / f"{section.name}.json"
        state = read_state(path)
        left = total_s - (time.monotonic() - begin)
        if path.exists() and state["status"] in FINISHED:
            print(f"{section.name}: {state['status']} before", flush=True)
        elif left < _LEAST_S:
            print(f"{section.name}: no time is left", flush=True)
            state = stored(section, states)
        else:
            state = _run_one(section, path, min(section.budget_s, left), launch)
        found[section.name] = state
    return found


def stored(section: Section, states: Path) -> dict[str, Any]:
    """The state of a section."""
    path = states / f"{section.name}.json"
    return read_state(path) if path.exists() else new_state() | {"status": "not run"}


def _run_one(section: Section, path: Path, seconds: float, launch: Launch) -> dict[str, Any]:
    print(f"{section.name}: {section.title}, at most {seconds:.0f} s", flush=True)
    before = read_state(path)
    write_state(path, before | {"status": "running", "reason": ""})
    began = time.monotonic()
    has_ended = launch(section.name, path, seconds)
    state = read_state(path)
    if not has_ended:
        state |= {"status": "cut", "reason": f"not done within {seconds:.0f} s"}
    elif state["status"] == "running":
        state |= {"status": "failed", "reason": "the process ended without a word"}
    state["seconds"] = round(before["seconds"] + time.monotonic() - began, 1)
    write_state(path, state)
    reason = f" ({state['reason']})" if state["reason"] else ""
    print(f"{section.name}: {state['status']}{reason}", flush=True)
    return state


def launch_process(settings: Settings) -> Launch:
    """Runs `benchmarks.gpu.child` with these settings."""

    def launch(name: str, path: Path, seconds: float) -> bool:
        command = [sys.executable, "-m", "benchmarks.gpu.child", name, str(path), *settings.arguments]
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        # A group of its own, so that what the section starts ends with it.
        process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, start_new_session=True)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end_group(process)
        return True

    return launch


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LET_END_S)
            if number == signal.SIGKILL or not _group_exists(process.pid):
                return


def _group_exists(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def describe(states: Path, launch: Launch) -> dict[str, Any]:
    """The device and the versions. Raises CannotRun without a device."""
    path = states / "describe.json"
    path.unlink(missing_ok=True)
    launch("describe", path, _DESCRIBE_S)
    state = read_state(path)
    if state["status"] != "done":
        raise CannotRun(state["reason"] or "the device does not answer")
    return dict(state["figures"]["device"])


def open_states(states: Path, identity: Mapping[str, Any], *, is_fresh: bool) -> None:
    """Make the folder of states ready for a run of this identity. Raises CannotRun if it holds another run's."""
    path = states / "run.json"
    if is_fresh:
        for old in states.glob("*.json"):
            old.unlink()
    if path.exists():
        stored = {name: value for name, value in read_state(path).items() if name in identity}
        different = [name for name, value in identity.items() if stored.get(name) != value]
        if different:
            raise CannotRun(f"{states} holds another run (other {', '.join(different)}): give --fresh or another --out")
    write_state(path, identity)
