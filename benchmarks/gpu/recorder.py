"""The figures of one section, in a file that is complete after each of them. Standard library only."""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.common import Spread, number

# running: a process has it, or died with it. cut: its time was over. unavailable: the machine lacks what it needs.
Status = Literal["running", "done", "cut", "failed", "unavailable"]


class Unavailable(Exception):
    """The machine lacks what the section needs."""


class Recorder:
    """Figures by name, each printed and stored as soon as it is there. One that is stored already is not measured again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = read_state(path)

    @property
    def figures(self) -> dict[str, Any]:
        return dict(self._state["figures"])

    def measure(self, name: str, function: Callable[[], object]) -> Any:
        """The stored figure of that name, else what `function` returns: a number, a text, a Spread, or a dict of these."""
        if name in self._state["figures"]:
            return self._state["figures"][name]
        self.put(name, function())
        return self._state["figures"][name]

    def put(self, name: str, value: object) -> None:
        self._state["figures"][name] = _plain(value)
        self._write()
        print(f"  {name}: {shown(self._state['figures'][name])}", flush=True)

    def has(self, *names: str) -> bool:
        return all(name in self._state["figures"] for name in names)

    def end(self, status: Status, reason: str = "") -> None:
        """Store how the section ended."""
        self._state |= {"status": status, "reason": reason}
        self._write()

    def _write(self) -> None:
        write_state(self._path, self._state)


def new_state() -> dict[str, Any]:
    return {"status": "running", "reason": "", "seconds": 0.0, "figures": {}}


def read_state(path: Path) -> dict[str, Any]:
    """The stored state, or an empty one where there is none."""
    try:
        return new_state() | dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return new_state()


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """At once: a reader, or the next run, sees the whole file or the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(state, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(path)


def median(figure: Any) -> float:
    """Of a stored Spread, or the number itself."""
    return float(figure["median"] if isinstance(figure, dict) else figure)


def shown(figure: Any) -> str:
    """A figure for people."""
    if isinstance(figure, dict):
        if figure.keys() == Spread.__dataclass_fields__.keys():
            return str(Spread(**figure))
        return ", ".join(f"{name} {shown(value)}" for name, value in figure.items())
    if isinstance(figure, list):
        return ", ".join(map(shown, figure))
    return number(figure)


def waited(is_reached: Callable[[], bool], limit_s: float, every_s: float = 0.02) -> float | None:
    """Seconds until `is_reached` says so; None if it does not within `limit_s`."""
    begin = time.perf_counter()
    while not is_reached():
        if time.perf_counter() - begin > limit_s:
            return None
        time.sleep(every_s)
    return time.perf_counter() - begin


def _plain(value: object) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
