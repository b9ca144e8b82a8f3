"""Spare processes: they take over from ranks that failed, and nothing of them is left behind."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from ray.util.placement_group import PlacementGroup

from cluster.driver import standby as rank_groups
from cluster.driver.rank_group import GroupInfo, RankGroup
from cluster.driver.ray_calls import result_of
from cluster.driver.standby import RankGroups
from cluster.rank import rank_worker
from cluster.rank.rank_worker import RankWorker, Share
from cluster.wire.process_end import is_running
from llama_core.errors import RankFailure
from tests.cluster.conftest import LIMITS
from tests.support.fake_runner import CONFIG, FakeFactory, step_input, tokens_of


@pytest.fixture
async def groups(two_rank_placement: PlacementGroup, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RankGroups]:
    monkeypatch.setattr(rank_groups, "SPARES_AFTER_S", 0.0)
    made = RankGroups(two_rank_placement, LIMITS, spares=True, runner_factory=FakeFactory())
    yield made
    await made.stop()


async def ready(groups: RankGroups, info: GroupInfo) -> list[int]:
    """Process ids of the spares, once they could take over."""
    groups.prepare_spares(info)
    async with asyncio.timeout(60):
        while groups.num_spares < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return [(await result_of(spare.status.remote())).pid for spare in groups._spares]


def pids(info: GroupInfo) -> list[int]:
    return [report.identity.process.pid for report in info.ranks]


async def fail(group: RankGroup, info: GroupInfo) -> None:
    os.kill(pids(info)[1], signal.SIGKILL)
    await group.wait_failed()
    await group.stop()


async def test_spares_become_the_next_epochs_ranks_and_are_followed_by_others(groups: RankGroups) -> None:
    first = groups.open(CONFIG, 0, None)
    info = await first.start()
    spares = await ready(groups, info)
    assert not set(spares) & set(pids(info))
    await fail(first, info)
    second = groups.open(CONFIG, 1, info.num_blocks)
    info_of_second = await second.start()
    assert pids(info_of_second) == spares and groups.num_spares == 0
    assert [report.identity.share for report in info_of_second.ranks] == [
        report.identity.share for report in info.ranks
    ], "what they may use is what those had"
    assert (await second.step(step_input(5, slots=(3,)))).tokens == tokens_of(5, (3,))
    others = await ready(groups, info_of_second)
    assert not set(others) & set(spares)
    await second.stop()
    assert not any(is_running(report.identity.process) for report in info_of_second.ranks)


async def test_a_group_is_made_without_spares_while_they_are_not_ready(groups: RankGroups) -> None:
    first = groups.open(CONFIG, 0, None)
    info = await first.start()
    groups.prepare_spares(info)
    await fail(first, info)
    second = groups.open(CONFIG, 1, None)
    info_of_second = await second.start()
    spares = await ready(groups, info_of_second)
    assert not set(spares) & set(pids(info_of_second))
    await second.stop()


async def test_a_spare_that_died_costs_one_attempt(groups: RankGroups) -> None:
    first = groups.open(CONFIG, 0, None)
    info = await first.start()
    os.kill((await ready(groups, info))[0], signal.SIGKILL)
    await fail(first, info)
    with pytest.raises(RankFailure, match="rank 0 died while starting"):
        await groups.open(CONFIG, 1, None).start()
    third = groups.open(CONFIG, 2, None)
    await third.start()
    await third.stop()


async def test_stopping_leaves_no_spare(groups: RankGroups) -> None:
    first = groups.open(CONFIG, 0, None)
    info = await first.start()
    spares = await ready(groups, info)
    await groups.stop()
    await first.stop()
    async with asyncio.timeout(10):
        while any(os.path.exists(f"/proc/{pid}") for pid in spares):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)


async def test_there_are_none_where_nobody_wants_them(two_rank_placement: PlacementGroup) -> None:
    unwanted = RankGroups(two_rank_placement, LIMITS, spares=False)
    unwanted.prepare_spares(GroupInfo(0, 1, ()))
    assert unwanted._preparing is None


def test_no_process_is_made_ready_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_worker, "available_host_bytes", lambda: rank_worker.SPARE_NEEDS_BYTES - 1)
    monkeypatch.setattr(rank_worker, "_import_quietly", lambda: pytest.fail("it was made ready"))
    assert not object.__new__(RankWorker).get_ready(Share(1))


async def test_a_spare_that_dies_is_followed_by_another(groups: RankGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_groups, "LOOK_AFTER_THEM_EVERY_S", 0.1)
    group = groups.open(CONFIG, 0, None)
    info = await group.start()
    first = await ready(groups, info)
    os.kill(first[1], signal.SIGKILL)
    async with asyncio.timeout(30):
        while groups.num_spares == 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    others = await ready(groups, info)
    assert not set(first) & set(others)
    await group.stop()
