"""Two servers, started by the first test that asks for one: their start takes as long as most of their tests together.

`test_end_to_end.py` ends both. Others that share them come before it in the order of the files.
"""

from collections.abc import Iterator

import pytest

from tests.deployments.served import GOLDEN_ARGS, SERVE_RUN, Server, served


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """The embedded model, by `make serve`'s command: HAProxy in front."""
    with served() as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def plain() -> Iterator[Server]:
    """The golden model by plain `serve run`: Serve's own proxy."""
    with served(command=SERVE_RUN, args=GOLDEN_ARGS, env={"RAY_SERVE_ENABLE_HA_PROXY": "0"}) as server:
        server.wait_ready()
        yield server


@pytest.fixture(params=["demo", "plain"], ids=["through HAProxy", "through Serve's proxy"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each of the two in turn."""
    either: Server = request.getfixturevalue(request.param)
    return either
