"""The start of two rank actors without a model, whose ranks die, stop or raise. Real Ray and sockets."""

import asyncio
import os
import signal
from types import SimpleNamespace

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from cluster.driver import rank_group
from cluster.driver.group_info import GroupInfo, GroupLimits
from cluster.driver.rank_actors import OPTIONS
from cluster.driver.rank_group import RankGroup
from cluster.wire.process_end import is_running
from cluster.wire.rank_status import Phase, RankStatus
from llama_core.errors import CheckpointError, RankFailure
from tests.cluster.conftest import LIMITS, Start, socket_directories
from tests.support.fake_runner import CONFIG, FakeFactory, Fault, SilentRankOne
from tests.support.waiting import until


async def loading(
    placement: PlacementGroup, limits: GroupLimits = LIMITS
) -> "tuple[RankGroup, asyncio.Task[GroupInfo]]":
    """A group whose rank 1 never ends its load, and its start."""
    factory = FakeFactory((Fault(1, "partition", "load"),))
    group = RankGroup(CONFIG, placement, limits=limits, runner_factory=factory)
    starting = asyncio.create_task(group.start())

    async def rank_one_loads() -> bool:
        status = (await group.statuses())[1] if len(group.ranks.identities) == 2 else None
        return status is not None and status.phase == Phase.LOADING

    await until("rank 1 loads", rank_one_loads)
    return group, starting


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Timeout]:
    """The deadlines of starts, which a test may bring forward."""
    made: list[asyncio.Timeout] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        made.append(asyncio.timeout(seconds))
        return made[-1]

    monkeypatch.setattr(rank_group, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": timeout}))
    return made


async def test_a_llama_error_in_load_is_raised_as_it_is(start: Start) -> None:
    with pytest.raises(CheckpointError, match=r"^shard 1 is damaged$") as caught:
        await start(FakeFactory((Fault(1, "damaged", "load", "shard 1 is damaged"),)))
    assert type(caught.value) is CheckpointError
    assert caught.value.param == "ckpt_dir"


async def test_a_death_in_load_names_the_rank_and_ends_the_group(two_rank_placement: PlacementGroup) -> None:
    factory = FakeFactory((Fault(1, "kill", "load"),))
    group = RankGroup(CONFIG, two_rank_placement, limits=LIMITS, runner_factory=factory)
    with pytest.raises(RankFailure, match="rank 1 died while loading"):
        await group.start()
    assert len(group.ranks.identities) == 2
    assert not any(is_running(identity.process) for identity in group.ranks.identities.values())
    assert not socket_directories()


async def test_a_death_before_identify_ends_the_identified_ranks(
    two_rank_placement: PlacementGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.driver.rank_actors.RankActor", ray.remote(**OPTIONS)(SilentRankOne))
    group = RankGroup(CONFIG, two_rank_placement, limits=LIMITS, runner_factory=FakeFactory())
    starting = asyncio.create_task(group.start())

    async def status_of_silent() -> RankStatus | None:
        return (await group.statuses())[1] if 0 in group.ranks.identities else None

    silent = await until("rank 0 is identified and rank 1 has a status", status_of_silent)
    os.kill(silent.pid, signal.SIGKILL)
    with pytest.raises(RankFailure, match="rank 1 died while starting"):
        await starting
    assert list(group.ranks.identities) == [0]
    assert not is_running(group.ranks.identities[0].process)


async def test_a_start_that_hangs_ends_at_its_deadline_and_describes_progress(
    two_rank_placement: PlacementGroup, deadlines: list[asyncio.Timeout]
) -> None:
    group, starting = await loading(two_rank_placement)
    deadlines[0].reschedule(asyncio.get_running_loop().time())
    with pytest.raises(RankFailure, match=r"within 120 s: .*rank 1 loading \(0 of 1,000 bytes\)"):
        await starting
    assert not any(is_running(identity.process) for identity in group.ranks.identities.values())


async def test_a_rank_that_is_stopped_while_it_loads_ends_the_start_at_the_step_deadline(
    two_rank_placement: PlacementGroup,
) -> None:
    group, starting = await loading(two_rank_placement, GroupLimits(start_timeout_s=600, step_timeout_s=10))
    os.kill(group.ranks.identities[1].process.pid, signal.SIGSTOP)
    with pytest.raises(RankFailure, match="rank 1 hangs: no answer to a status call within 10 s"):
        await starting  # long before the start's own deadline
    assert not any(is_running(identity.process) for identity in group.ranks.identities.values())


async def test_a_cancelled_start_leaves_no_process(two_rank_placement: PlacementGroup) -> None:
    group, starting = await loading(two_rank_placement)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(is_running(identity.process) for identity in group.ranks.identities.values())
