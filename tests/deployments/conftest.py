"""Time for HTTP answers on a busy machine, and the event loops of tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from tests.support.virtual_loop import VirtualLoop

DEFAULT_TIMEOUT_CONFIG.connect = DEFAULT_TIMEOUT_CONFIG.read = 60.0  # instead of 5 s

LOOP = {"asyncio": asyncio.new_event_loop}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A module's `LOOPS`: each of its tests runs once in each of them."""
    found: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = getattr(getattr(item, "module", None), "LOOPS", LOOP)
    return found


@pytest.fixture(autouse=True)
async def no_callback_fails() -> AsyncIterator[None]:
    yield
    loop = asyncio.get_running_loop()
    assert not isinstance(loop, VirtualLoop) or not loop.errors, loop.errors
