"""Parameters and numbers of examples of tests, of which only some are part of each run."""

import os
import sys
from collections.abc import Container, Iterable
from typing import Any

import pytest

_VARIABLE = "LLAMA_TESTS_FULL"  # for the workers of pytest-xdist, which do not see the command line
IS_FULL = "--full" in sys.argv or _VARIABLE in os.environ
if IS_FULL:
    os.environ[_VARIABLE] = "1"


def with_full_ones(values: Iterable[str | tuple[Any, ...]], in_each_run: Container[Any]) -> list[Any]:
    """Parameters of a test. Those that are not part of each run are for `--full` alone."""
    return [
        value
        if value in in_each_run
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full)
        for value in values
    ]


def examples(in_each_run: int, in_full_runs: int) -> int:
    """The number of random examples of a test."""
    return in_full_runs if IS_FULL else in_each_run
