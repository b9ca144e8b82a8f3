"""Parameters and numbers of examples of tests, of which only some are part of each run."""

import sys
from collections.abc import Container, Iterable
from typing import Any

import pytest


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
    return in_full_runs if "--full" in sys.argv else in_each_run
