"""Which of the native engine's builds each run of the tests compares."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.native_builds import IN_EACH_RUN


def with_full_ones(flags: Sequence[str]) -> list[Any]:
    """Parameters of a test. Those beyond `IN_EACH_RUN` are for `--full` alone."""
    return [each if each in IN_EACH_RUN else pytest.param(each, marks=pytest.mark.full) for each in flags]
