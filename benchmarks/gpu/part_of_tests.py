"""A plugin of pytest that keeps a part of the tests: `TEST_PART=2/8` keeps every eighth one, from the third. Needs no xdist."""

import os
from typing import Final

import pytest

VARIABLE: Final = "TEST_PART"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After marks have deselected tests."""
    index, count = map(int, os.environ[VARIABLE].split("/"))
    items[:] = items[index::count]
