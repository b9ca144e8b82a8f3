"""Three servers for the whole session, because a start takes as long as many tests together.

Tests of `plain` come before all others, so that it has ended when `demo` starts: an idle server takes an eighth of a core.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

from tests.conftest import GOLDEN
from tests.support import adapters
from tests.support.otlp_collector import Traced, traced_server
from tests.support.server import GOLDEN_ARGS, SERVE_RUN, Server, served

ENDING = ("test_end_to_end.py", "test_upgrade.py")  # their last tests end `plain` and `demo`, and `traced`
ADMIN_KEY = "kq7-admin"  # of `plain` and of the fronts
API_KEYS = ("kq7-one", "kq7-two")
CPUS_PER_RANK = 0.5  # of `traced`, so that two cores have room for another replica
DEFAULT_TIMEOUT_CONFIG.connect = DEFAULT_TIMEOUT_CONFIG.read = 60.0  # instead of 5 s, because the machine may be busy


class Malicious:
    """An object whose pickle makes a directory when it is loaded."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trap),)


def flip_a_bit(path: Path) -> None:
    """Flip the lowest bit of a weight in the middle of the file, which only the checksum can detect."""
    content = bytearray(path.read_bytes())
    content[len(content) // 8 * 4] ^= 1
    path.write_bytes(content)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests of this folder: those of `plain` first, and those of files that end servers after the other files'."""
    folder, is_full = Path(__file__).parent, bool(config.getoption("--full"))
    here = [number for number, item in enumerate(items) if item.path.is_relative_to(folder)]
    tests = [items[number] for number in here]
    tests.sort(key=lambda item: (not _uses_plain(item, is_full), item.path.name in ENDING))
    for number, item in zip(here, tests, strict=True):
        items[number] = item


def _uses_plain(item: pytest.Item, is_full: bool) -> bool:
    names: Sequence[str] = getattr(item, "fixturenames", ())
    callspec = getattr(item, "callspec", None)
    if "plain" in names or (callspec is not None and "plain" in callspec.params.values()):
        return True
    return is_full and "servers" in names


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """The demo model, started by `make serve`'s command, behind HAProxy."""
    with served() as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="session")
def poet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the golden model, which `plain` has as golden-poet."""
    folder = tmp_path_factory.mktemp("adapters") / "poet"
    adapters.write(folder, GOLDEN / "mp1", adapters.SHAPES["all"])
    return folder


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory, poet: Path) -> Iterator[Server]:
    """The golden model with a manifest, an adapter and an admin key, started by plain `serve run`, behind Serve's own proxy."""
    manifest = tmp_path_factory.mktemp("trusted") / "golden.sha256"
    files = sorted((GOLDEN / "mp1").iterdir())
    manifest.write_text("".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file}\n" for file in files))
    args = GOLDEN_ARGS | {"sha256_manifest": str(manifest), "spare_ranks": False}
    args |= {"lora_adapters": {"golden-poet": str(poet)}, "lora_root": str(poet.parent)}
    env = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "LLAMA_ADMIN_KEYS": ADMIN_KEY}
    with served(command=SERVE_RUN, args=args, env=env) as server:
        server.wait_ready()
        yield server


SHARED_MEMORY_BEFORE: set[str] = set()  # files of the machine before the start of `traced`


@pytest.fixture(scope="session")
def traced() -> Iterator[Traced]:
    """The demo model without standby processes, with traces, a log of JSON and two API keys."""
    SHARED_MEMORY_BEFORE.update(os.listdir("/dev/shm"))
    args = {"max_seq_len": 4096, "spare_ranks": False, "cpus_per_rank": CPUS_PER_RANK}
    with traced_server(api_keys=API_KEYS, **args) as running:
        yield running


# Runs a test through HAProxy, and with --full also through Serve's proxy.
THROUGH_HAPROXY = pytest.mark.parametrize(
    "server",
    [
        pytest.param("demo", id="through HAProxy"),
        pytest.param("plain", id="through Serve's proxy", marks=pytest.mark.full),
    ],
    indirect=True,
)


@pytest.fixture(params=["demo", "plain"], ids=["through HAProxy", "through Serve's proxy"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each of the two servers in turn."""
    either: Server = request.getfixturevalue(request.param)
    return either
