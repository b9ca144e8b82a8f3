"""The figures of a run in one file, which is complete after each of them. Standard library only."""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.common import as_json, shown

# running: a process has it, or died with it. cut: its time was over. unavailable: the machine lacks what it needs.
Status = Literal["running", "done", "cut", "failed", "unavailable"]


class Unavailable(Exception):
    """The machine lacks what the section needs."""


class Recorder:
    """One section's figures by name, each printed and stored as soon as it is there. One that is stored already is not measured
    again. The file has all sections; one process at a time writes to it."""

    def __init__(self, path: Path, section: str) -> None:
        self._path = path
        self._run = read_run(path)
        empty = {"status": "running", "reason": "", "figures": {}}
        self.state: dict[str, Any] = self._run["sections"].setdefault(section, empty)

    @property
    def figures(self) -> dict[str, Any]:
        return dict(self.state["figures"])

    def measure(self, name: str, function: Callable[[], object]) -> Any:
        """The stored figure of that name, else what `function` returns: a number, a text, a Spread, or a dict of these."""
        if name not in self.state["figures"]:
            self.put(name, function())
        return self.state["figures"][name]

    def put(self, name: str, value: object) -> None:
        self.state["figures"] |= as_json({name: value})
        write_run(self._path, self._run)
        print(f"  {name}: {shown(self.state['figures'][name])}", flush=True)

    def has(self, *names: str) -> bool:
        return all(name in self.state["figures"] for name in names)

    def end(self, status: Status, reason: str = "") -> None:
        """Store how the section stands."""
        self.state |= {"status": status, "reason": reason}
        write_run(self._path, self._run)


def read_run(path: Path) -> dict[str, Any]:
    """The stored run, or an empty one where there is none."""
    return dict(json.loads(path.read_text())) if path.exists() else {"sections": {}}


def write_run(path: Path, run: Mapping[str, Any]) -> None:
    """At once: a reader sees the whole file or the one before."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(path)


def median(figure: Any) -> float:
    """Of a stored Spread, or the number itself."""
    return float(figure["median"] if isinstance(figure, dict) else figure)


def waited(is_reached: Callable[[], bool], limit_s: float, every_s: float = 0.02) -> float | None:
    """Seconds until `is_reached` says so; None if it does not within `limit_s`."""
    begin = time.perf_counter()
    while not is_reached():
        if time.perf_counter() - begin > limit_s:
            return None
        time.sleep(every_s)
    return time.perf_counter() - begin
