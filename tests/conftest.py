"""Shared by all tests: the paths of the test data, and processes that form a group of ranks."""

import gc
import json
import multiprocessing
import multiprocessing.connection
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.full_runs import examples

# Python's garbage collector walks the imported libraries' objects again and again: a sixth of the processor time of tests that
# compute little.
gc.set_threshold(20_000, 20, 20)

# The time of an example depends on the load of the machine.
hypothesis.settings.register_profile(
    "shared",
    deadline=None,
    max_examples=examples(40, 100),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("shared")

# By the beginning of a path: the mark of its tests, which says when `make test` runs them.
MARKS = {
    "cluster/driver/test_two_nodes.py": "servers",
    "cluster/": "ranks",
    "servers/": "servers",
    "chaos/": "servers",
}
# By the beginning of a path: tests of a group run in one worker of pytest-xdist, one after the other, because they share
# servers. Each other file is a group of its own.
GROUPS = {
    "servers/test_abrupt_ends.py": "startup",
    "servers/test_autoscaling.py": "autoscaling",
    "servers/test_batches.py": "batches",
    "servers/test_elastic.py": "elastic",
    "servers/test_own_cluster.py": "own cluster",
    "servers/test_sleeping.py": "sleeping",
    "servers/test_fronts.py": "fronts",
    "servers/test_startup.py": "startup",
    "servers/test_logs_and_traces.py": "traced server",
    "servers/test_required_keys.py": "traced server",
    "servers/test_serve_faults.py": "traced server",
    "servers/test_upgrade.py": "traced server",
    "servers/test_wheel.py": "startup",
    "servers/": "demo and plain servers",
}

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Outputs of Meta's reference implementation; see tests/data/golden/README.md."""
    loaded: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
    return loaded


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full")


def pytest_configure() -> None:
    # A job that a shell runs in the background inherits an ignored SIGINT, and so would the programs of tests.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def found(table: Mapping[str, str], path: str, otherwise: str) -> str:
    return next((value for start, value in table.items() if path.startswith(f"tests/{start}")), otherwise)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return found(GROUPS, path, path)

    return Groups(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if mark := found(MARKS, item.nodeid, ""):
            item.add_marker(mark)
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_collection_finish() -> None:
    """What lives now lives as long as the process: the garbage collector need not walk it."""
    gc.collect()
    gc.freeze()


class RankPool:
    """`world_size` processes joined by gloo. They live for the whole session, and are forks of one process that has imported
    torch, which takes seconds."""

    def __init__(self, world_size: int, store: Path) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.on_ranks", "torch._dynamo"])
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, world_size, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run function(parallel, *args) on every rank. Returns the results in the order of the ranks."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results = [pipe.recv() for pipe in self._pipes]
        for rank, (ok, value) in enumerate(results):
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
        return [value for _, value in results]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=60)
            if process.is_alive():
                process.kill()


def _rank_main(rank: int, world_size: int, store: str, pipe: multiprocessing.connection.Connection) -> None:
    import torch
    import torch.distributed as dist

    from llama_core.backends.parallel import join

    torch.set_num_threads(1)
    parallel = join(rank, world_size, "cpu", dist.FileStore(store, world_size))  # type: ignore[attr-defined]
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(parallel, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """ranks(n): a pool of n ranks, started on first use."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size, tmp_path_factory.mktemp("store") / f"ranks{world_size}")
        return pools[world_size]

    yield pool
    for started in pools.values():
        started.close()
