"""Warm standby processes take over from ranks that failed, and none is left behind."""

import os
import signal
from collections.abc import AsyncIterator

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from cluster.driver import standby
from cluster.driver.group_info import GroupInfo
from cluster.driver.rank_actors import OPTIONS
from cluster.driver.rank_group import RankGroup
from cluster.driver.ray_calls import result_of
from cluster.driver.standby import StandbyPool
from cluster.rank import rank_process
from cluster.rank.rank_process import RankProcess
from cluster.wire.process_end import is_running
from cluster.wire.rank_status import Share
from tests.cluster.conftest import LIMITS
from tests.support.fake_runner import CONFIG, FakeFactory, StandbyWithoutTorch, step_input, tokens_of
from tests.support.waiting import until_true


@pytest.fixture
async def pool(two_rank_placement: PlacementGroup, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StandbyPool]:
    monkeypatch.setattr(standby, "START_DELAY_S", 0.0)
    monkeypatch.setattr(standby, "CHECK_PERIOD_S", 0.1)
    monkeypatch.setattr("cluster.driver.rank_actors.RankActor", ray.remote(**OPTIONS)(StandbyWithoutTorch))
    made = StandbyPool(two_rank_placement, LIMITS, enabled=True, runner_factory=FakeFactory())
    yield made
    await made.stop()


async def ready(pool: StandbyPool, info: GroupInfo) -> list[int]:
    """Process ids of the standby processes, once they can take over."""
    pool.prepare_standby(info)
    await until_true("two processes are on standby", lambda: pool.num_standby >= 2)
    return [(await result_of(actor.status.remote())).pid for actor in pool._standby]


def pids(info: GroupInfo) -> list[int]:
    return [report.pid for report in info.ranks]


async def fail(group: RankGroup, info: GroupInfo) -> None:
    os.kill(pids(info)[1], signal.SIGKILL)
    await group.wait_failed()
    await group.stop()


async def test_standby_processes_that_become_ranks_or_die_are_replaced(pool: StandbyPool) -> None:
    first = pool.open_group(CONFIG, 0, None)
    info = await first.start()
    processes = await ready(pool, info)
    assert not set(processes) & set(pids(info))
    await fail(first, info)
    second = pool.open_group(CONFIG, 1, info.num_blocks)
    info_of_second = await second.start()
    assert pids(info_of_second) == processes and pool.num_standby == 0
    assert [identity.share for identity in info_of_second.identities] == [
        identity.share for identity in info.identities
    ], "a standby process has the share of the rank that it replaces"
    assert (await second.submit(step_input(5, slots=(3,)))).tokens == tokens_of(5, (3,))
    others = await ready(pool, info_of_second)
    assert not set(others) & set(processes)

    os.kill(others[1], signal.SIGKILL)
    await until_true("the pool notices the dead process", lambda: pool.num_standby != 2)
    last = await ready(pool, info_of_second)
    assert not set(last) & set(others)
    await pool.stop()
    await second.stop()
    await until_true("the processes have ended", lambda: not any(os.path.exists(f"/proc/{pid}") for pid in last))
    assert not any(is_running(identity.process) for identity in info_of_second.identities)


def test_a_standby_process_declines_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "available_host_bytes", lambda: rank_process.STANDBY_NEEDS_BYTES - 1)
    monkeypatch.setattr(rank_process, "_import_at_low_priority", lambda has_gpus: pytest.fail("it imported torch"))
    assert not RankProcess(0, 1, "node", "127.0.0.1").preload(Share(1))
