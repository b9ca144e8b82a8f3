"""Bounds the work of one rendering: steps, characters, nested values and processor time.

A template comes from a download, so it may be damaged or hostile. The compiled template counts a step at each loop
iteration, call, operator and filter, in the thread that renders. Nothing here can interrupt a single operation of Python,
so each is counted before it runs: with the characters of its result, and with steps where it reads or compares more than
those. A value with parts is weighed when it is made or given to an operation.
"""

import threading
import time
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from typing import Final

MAX_STEPS: Final = 2_000_000
MAX_SECONDS: Final = 2.0  # of the rendering thread's processor time; a usual dialog takes a millisecond
MAX_WEIGHT: Final = 200_000  # of a list, tuple or dict: its items and theirs, and 1 for each 64 characters of text
BASE_CHARS: Final = 2**25  # that all string operations of one rendering may produce together
CHARS_PER_INPUT_CHAR: Final = 16
MAX_WRITTEN_WEIGHT: Final = 50_000  # of a value that is written as text, which may be 12 times as long
_STEPS_BETWEEN_CLOCKS: Final = 64
_CHARS_PER_STEP: Final = 256  # read in C
_WEIGHT_PER_STEP: Final = 16


class TemplateTooExpensive(Exception):
    """A rendering needs more steps, memory or time than any dialog may."""


class Budget:
    """What one rendering may still do."""

    __slots__ = ("_chars", "_end_s", "_kept", "_steps", "_until_clock", "_weights")

    def __init__(self, num_input_chars: int) -> None:
        self._steps = MAX_STEPS
        self._chars = BASE_CHARS + CHARS_PER_INPUT_CHAR * num_input_chars
        self._end_s = time.thread_time() + MAX_SECONDS
        self._until_clock = _STEPS_BETWEEN_CLOCKS
        self._weights: dict[int, int] = {}  # by id of a list, tuple or dict, which `_kept` keeps alive
        self._kept: list[object] = []

    def step(self, count: int) -> None:
        self._steps -= count
        self._until_clock -= 1 if count < _STEPS_BETWEEN_CLOCKS else _STEPS_BETWEEN_CLOCKS
        if self._steps < 0:
            raise TemplateTooExpensive(f"it takes more than {MAX_STEPS} steps")
        if self._until_clock <= 0:
            self._until_clock = _STEPS_BETWEEN_CLOCKS
            if time.thread_time() > self._end_s:
                raise TemplateTooExpensive(f"it takes more than {MAX_SECONDS:g} s")

    def produce(self, num_chars: int) -> None:
        self._chars -= num_chars
        if self._chars < 0:
            raise TemplateTooExpensive("it produces too much text")

    def weigh(self, value: object) -> int:
        """The size of a value with everything in it. A part that occurs twice counts twice: copying walks it twice."""
        if isinstance(value, str):
            return 1 + len(value) // 64
        if not isinstance(value, list | tuple | dict | KeysView | ValuesView | ItemsView):
            return 1
        known = self._weights.get(id(value))
        if known is not None:
            return known
        self.step(len(value) + 1)
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        weight = 1 + sum(map(self.weigh, parts))
        if weight > MAX_WEIGHT:
            raise TemplateTooExpensive("it builds a value with too many parts")
        self._weights[id(value)] = weight
        self._kept.append(value)
        return weight


_rendering = threading.local()


@contextmanager
def bounded(num_input_chars: int) -> Iterator[None]:
    """Bound everything that this thread renders inside. Not reentrant."""
    _rendering.budget = Budget(num_input_chars)
    try:
        yield
    finally:
        _rendering.budget = None


def _budget() -> Budget | None:
    budget: Budget | None = getattr(_rendering, "budget", None)
    return budget


def step(count: int = 1) -> None:
    """Count steps. Raises TemplateTooExpensive. Outside `bounded` nothing is counted."""
    budget = _budget()
    if budget is not None:
        budget.step(count)


def produce(num_chars: int) -> None:
    """Count a step, and characters before they are produced. Raises TemplateTooExpensive."""
    budget = _budget()
    if budget is not None:
        budget.step(1)
        budget.produce(num_chars)


def weigh(value: object) -> int:
    """Count a value before it is built into another; 0 outside `bounded`. Raises TemplateTooExpensive."""
    budget = _budget()
    return 0 if budget is None else budget.weigh(value)


def walk(*values: object) -> None:
    """Count values that an operation reads as a whole: compares, sorts, searches. Raises TemplateTooExpensive."""
    budget = _budget()
    if budget is not None:
        weight = sum(map(budget.weigh, values))
        if weight > 2 * MAX_WEIGHT:
            raise TemplateTooExpensive("it gives an operation too many values")
        budget.step(1 + weight // _WEIGHT_PER_STEP)


def write(value: object) -> None:
    """Count a value that is written as text. Raises TemplateTooExpensive before the text is made."""
    if weigh(value) > MAX_WRITTEN_WEIGHT:
        raise TemplateTooExpensive("it writes a value with too many parts")


def search(num_chars: int, num_sought: int) -> None:
    """Count a search that may compare all of `num_sought` characters at each of `num_chars` places."""
    step(1 + max(num_chars, 0) * max(num_sought, 1) // _CHARS_PER_STEP)
