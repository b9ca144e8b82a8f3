"""The start of two rank actors without a model, whose ranks die, stop or raise in every phase. Real Ray and sockets."""

import asyncio
import dataclasses
import os
import signal
from types import SimpleNamespace

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from cluster.driver import rank_group
from cluster.driver.group_info import GroupLimits
from cluster.driver.rank_actors import OPTIONS
from cluster.driver.rank_group import RankGroup
from cluster.wire.messages import Hello, WireError
from cluster.wire.process_end import is_running
from cluster.wire.rank_status import Phase, RankStatus
from cluster.wire.transport import Invitation, RankConnection, RankListener
from llama_core.errors import CheckpointError, ConfigError, RankFailure
from tests.cluster.conftest import LIMITS, Start
from tests.cluster.driver.group_processes import socket_directories
from tests.support.fake_runner import CONFIG, FakeFactory, SilentRankOne
from tests.support.rank_faults import Fault
from tests.support.waiting import until


async def is_loading(group: RankGroup) -> bool:
    return any(status and status.phase == Phase.LOADING for status in await group.statuses())


async def rank_one_loads(group: RankGroup) -> bool:
    status = (await group.statuses())[1] if len(group.ranks.identities) == 2 else None
    return status is not None and status.phase == Phase.LOADING


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Timeout]:
    """The deadlines of starts, which a test may bring forward."""
    made: list[asyncio.Timeout] = []

    def timeout(seconds: float) -> asyncio.Timeout:
        made.append(asyncio.timeout(seconds))
        return made[-1]

    monkeypatch.setattr(rank_group, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": timeout}))
    return made


def expire(deadline: asyncio.Timeout) -> None:
    deadline.reschedule(asyncio.get_running_loop().time())


async def test_a_llama_error_in_load_is_raised_as_it_is(start: Start) -> None:
    with pytest.raises(CheckpointError, match=r"^shard 1 is damaged$") as caught:
        await start(FakeFactory((Fault(1, "damaged", "load", "shard 1 is damaged"),)))
    assert type(caught.value) is CheckpointError
    assert caught.value.param == "ckpt_dir"


@pytest.mark.full
async def test_another_exception_in_load_names_rank_phase_and_text(start: Start) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 failed \(ValueError\) while loading: no memory") as caught:
        await start(FakeFactory((Fault(1, "raise", "load", "no memory"),)))
    assert caught.value.rank == 1


# In each run, an error in load and a death in load name their rank and phase.
@pytest.mark.full
async def test_an_exception_while_warming_up_names_rank_and_phase(start: Start) -> None:
    with pytest.raises(RankFailure, match=r"rank 0 .* while warming up: bad kernel"):
        await start(FakeFactory((Fault(0, "raise", "warm_up", "bad kernel"),)))


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
async def test_a_death_in_load_names_the_rank_and_ends_the_group(two_rank_placement: PlacementGroup, rank: int) -> None:
    factory = FakeFactory((Fault(rank, "kill", "load"),))
    group = RankGroup(CONFIG, two_rank_placement, limits=LIMITS, runner_factory=factory)
    with pytest.raises(RankFailure, match=f"rank {rank} died while loading"):
        await group.start()
    assert len(group.ranks.identities) == 2
    assert not any(is_running(identity.process) for identity in group.ranks.identities.values())
    assert not socket_directories()


@pytest.mark.full
async def test_a_death_in_warm_up_names_rank_and_phase(two_rank_placement: PlacementGroup) -> None:
    factory = FakeFactory((Fault(1, "kill", "warm_up"),))
    group = RankGroup(CONFIG, two_rank_placement, limits=LIMITS, runner_factory=factory)
    with pytest.raises(RankFailure, match="rank 1 died while warming up"):
        await group.start()
    assert not any(is_running(identity.process) for identity in group.ranks.identities.values())


# In each run, a rank dies before the connection and after it.
@pytest.mark.full
async def test_a_death_right_after_identify_ends_the_group(
    two_rank_placement: PlacementGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = RankGroup(CONFIG, two_rank_placement, limits=LIMITS, runner_factory=FakeFactory())
    open_listener = RankListener.open

    async def open_after_a_death(listener: RankListener) -> Invitation:
        os.kill(group.ranks.identities[1].process.pid, signal.SIGKILL)
        return await open_listener(listener)

    monkeypatch.setattr(RankListener, "open", open_after_a_death)
    with pytest.raises(RankFailure, match="rank 1 died while connecting"):
        await group.start()
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


async def test_a_refused_hello_ends_the_start_long_before_its_deadline(
    two_rank_placement: PlacementGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = RankListener.admit

    def refuse_rank_one(listener: RankListener, connection: RankConnection, hello: Hello) -> int:
        if hello.rank == 1:
            raise WireError("refused by the test")
        return admit(listener, connection, hello)

    monkeypatch.setattr(RankListener, "admit", refuse_rank_one)
    monkeypatch.setattr("cluster.driver.rank_group._CONNECT_TIMEOUT_S", 5.0)
    group = RankGroup(CONFIG, two_rank_placement, limits=LIMITS, runner_factory=FakeFactory())
    with pytest.raises(RankFailure, match=r"no valid connection from ranks \[1\] within 5 s") as caught:
        await group.start()
    assert caught.value.rank == 1
    assert not any(is_running(identity.process) for identity in group.ranks.identities.values())
    assert not socket_directories()


# In each run, a start is cancelled earlier, and another one describes its progress.
@pytest.mark.full
async def test_a_start_that_is_cancelled_while_it_describes_progress_leaves_no_process(
    two_rank_placement: PlacementGroup, monkeypatch: pytest.MonkeyPatch, deadlines: list[asyncio.Timeout]
) -> None:
    group = RankGroup(
        CONFIG, two_rank_placement, limits=LIMITS, runner_factory=FakeFactory((Fault(1, "partition", "load"),))
    )
    asked = asyncio.Event()

    async def ask_for_ever() -> str:
        asked.set()
        return await asyncio.Future()

    monkeypatch.setattr(group.ranks, "describe_progress", ask_for_ever)
    starting = asyncio.create_task(group.start())
    await until("rank 1 loads", lambda: rank_one_loads(group))
    expire(deadlines[0])
    await asked.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert len(group.ranks.identities) == 2
    assert not any(is_running(identity.process) for identity in group.ranks.identities.values())


async def test_a_configuration_with_too_long_steps_is_refused_before_any_rank_exists(
    two_rank_placement: PlacementGroup,
) -> None:
    config = dataclasses.replace(CONFIG, max_batch_size=256, max_step_tokens=512, max_seq_len=131_072)
    group = RankGroup(config, two_rank_placement, limits=LIMITS, runner_factory=FakeFactory())
    with pytest.raises(ConfigError, match="max_batch_size 256 with max_seq_len 131072"):
        await group.start()
    assert not group.ranks.actors


async def test_a_start_that_hangs_ends_at_its_deadline_and_describes_progress(
    two_rank_placement: PlacementGroup, deadlines: list[asyncio.Timeout]
) -> None:
    group = RankGroup(
        CONFIG, two_rank_placement, limits=LIMITS, runner_factory=FakeFactory((Fault(1, "partition", "load"),))
    )
    starting = asyncio.create_task(group.start())
    await until("rank 1 loads", lambda: rank_one_loads(group))
    expire(deadlines[0])
    with pytest.raises(RankFailure, match=r"within 120 s: .*rank 1 loading \(0 of 1,000 bytes\)"):
        await starting
    assert not any(is_running(identity.process) for identity in group.ranks.identities.values())


async def test_a_rank_that_is_stopped_while_it_loads_ends_the_start_at_the_step_deadline(
    two_rank_placement: PlacementGroup,
) -> None:
    limits = GroupLimits(start_timeout_s=600, step_timeout_s=10)
    group = RankGroup(
        CONFIG, two_rank_placement, limits=limits, runner_factory=FakeFactory((Fault(1, "partition", "load"),))
    )
    starting = asyncio.create_task(group.start())
    await until("a rank loads", lambda: is_loading(group))
    os.kill(group.ranks.identities[1].process.pid, signal.SIGSTOP)
    with pytest.raises(RankFailure, match="rank 1 hangs: no answer to a status call within 10 s"):
        await starting  # long before the start's own deadline
    assert not any(is_running(identity.process) for identity in group.ranks.identities.values())


async def test_a_cancelled_start_leaves_no_process(two_rank_placement: PlacementGroup) -> None:
    group = RankGroup(
        CONFIG, two_rank_placement, limits=LIMITS, runner_factory=FakeFactory((Fault(1, "partition", "load"),))
    )
    starting = asyncio.create_task(group.start())
    await until("a rank loads", lambda: is_loading(group))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(is_running(identity.process) for identity in group.ranks.identities.values())


async def test_a_context_that_steps_are_too_short_for_is_lowered_and_the_reason_reported(
    two_rank_placement: PlacementGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.driver.rank_group.longest_sequence", lambda max_batch_size, block_size: 48)
    config = dataclasses.replace(CONFIG, lowers_max_seq_len=True)
    assert config.max_seq_len > 48
    group = RankGroup(config, two_rank_placement, limits=LIMITS, runner_factory=FakeFactory())
    try:
        info = await group.start()
    finally:
        await group.stop()
    assert info.context_limit == f"what one step can send for {config.max_batch_size} sequences"
