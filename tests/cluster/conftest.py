"""One Ray cluster for all tests of this folder that need one, on this machine alone, ended after them."""

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import ray
import uvloop
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from cluster.driver.group_info import GroupInfo, GroupLimits
from cluster.driver.placement import group_bundles
from cluster.driver.rank_actors import RankActors
from cluster.driver.rank_group import RankGroup
from cluster.wire.process_end import ProcessIdentity, is_running
from cluster.wire.rank_runner import RunnerFactory
from cluster.wire.socket_dir import PREFIX, parent_dir
from tests.support.fake_runner import CONFIG, FakeFactory
from tests.support.ray_nodes import few_processes

REPOSITORY = Path(__file__).parents[2]
LIMITS = GroupLimits(start_timeout_s=120, step_timeout_s=60)


@pytest.fixture(scope="module", autouse=True)
def _own_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests assert that no socket directory is left, and other workers have theirs in the usual directory."""
    tempfile.tempdir = str(tmp_path_factory.mktemp("ranks"))
    yield
    tempfile.tempdir = None


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """A separate Ray cluster with 6 logical CPUs and 2 logical GPUs, whose workers can import this repository."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    with few_processes():
        ray.init(
            address="local",
            num_cpus=6,
            num_gpus=2,  # which no process uses: Ray counts them
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    yield
    ray.shutdown()


@pytest.fixture(scope="package")
def two_rank_placement(ray_cluster: None) -> Iterator[PlacementGroup]:
    """Bundles for a replica and two ranks. Tests use it one after the other, as the epochs of one replica do."""
    group = placement_group(group_bundles(2, "cpu"), strategy="STRICT_PACK")
    ray.get(group.ready(), timeout=120)
    yield group
    remove_placement_group(group)


def processes(info: GroupInfo) -> list[ProcessIdentity]:
    return [identity.process for identity in info.identities]


def socket_directories() -> set[Path]:
    return set(parent_dir().glob(PREFIX + "*"))


async def assert_gone(group: RankGroup, running: list[ProcessIdentity]) -> None:
    await asyncio.wait_for(group.stop(), 60)
    assert not any(is_running(process) for process in running)
    assert not socket_directories()


Start = Callable[..., Awaitable[tuple[RankGroup, GroupInfo]]]


@pytest.fixture
async def start(two_rank_placement: PlacementGroup, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """start(...) -> a started group of two fake ranks and its info; stopped after the test."""
    groups: list[RankGroup] = []
    first_silent = RankActors.first_silent
    # A test's step deadline may be shorter than what a busy machine needs for a status call while the ranks start.
    monkeypatch.setattr(RankActors, "first_silent", lambda ranks, _: first_silent(ranks, LIMITS.step_timeout_s))

    async def start_group(
        factory: RunnerFactory | None = None,
        *,
        epoch: int = 1,
        limits: GroupLimits = LIMITS,
        num_blocks: int | None = None,
    ) -> tuple[RankGroup, GroupInfo]:
        group = RankGroup(
            CONFIG,
            two_rank_placement,
            epoch=epoch,
            num_blocks=num_blocks,
            limits=limits,
            runner_factory=factory or FakeFactory(),
        )
        groups.append(group)
        return group, await group.start()

    yield start_group
    for group in groups:
        await group.stop()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """uvloop, as in a Serve replica."""
    return {"uvloop": uvloop.new_event_loop}
