"""Time for HTTP answers on a busy machine, and the event loops of tests."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from deployments.links import front_server
from tests.support.virtual_loop import listener

DEFAULT_TIMEOUT_CONFIG.connect = DEFAULT_TIMEOUT_CONFIG.read = 60.0  # instead of 5 s

LOOP = {"asyncio": asyncio.new_event_loop}


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """A module's `LOOPS`: each of its tests runs once in each of them."""
    found: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = getattr(getattr(item, "module", None), "LOOPS", LOOP)
    return found


@pytest.fixture(autouse=True)
def _listens_in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(request.module, "LOOPS"):
        monkeypatch.setattr(front_server, "TlsListener", listener)
