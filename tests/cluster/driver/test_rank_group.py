"""Two rank actors without a model in service: stepped, ended, killed, stopped, broken. Real Ray and sockets."""

import asyncio
import os
import signal
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import PlacementGroup

from cluster.driver.group_info import GroupInfo, GroupLimits
from cluster.driver.rank_group import RankGroup
from cluster.wire.process_end import is_running
from cluster.wire.rank_runner import RankRunner, RendezvousSpec
from cluster.wire.rank_status import Phase
from cluster.wire.socket_dir import parent_dir, remove_stale
from llama_core.config import EngineConfig
from llama_core.errors import CheckpointError, RankFailure
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import SlotInit, StepInput
from tests.cluster.conftest import LIMITS, Start, assert_gone, processes, socket_directories
from tests.support.fake_runner import CONFIG, FakeFactory, Fault, step_input, tokens_of
from tests.support.waiting import until_true


async def test_steps_come_back_in_order_and_stop_leaves_no_process_and_no_socket(start: Start) -> None:
    group, info = await start()
    assert info.num_blocks == 49  # the smaller of the two ranks'
    assert [identity.rank for identity in info.identities] == [0, 1]
    assert [report.weight_bytes for report in info.ranks] == [1000, 1000]
    for step in range(20):
        output = await group.submit(step_input(step))
        assert (output.epoch, output.step, output.tokens) == (1, step, tokens_of(step))
    assert [status and status.phase for status in await group.statuses()] == [Phase.SERVING] * 2
    assert group.failure is None
    outputs = await asyncio.gather(*(group.submit(step_input(step)) for step in range(20, 120)))
    assert [output.step for output in outputs] == list(range(20, 120)), "several steps may be in flight"
    admit = [SlotInit(slot, [31_999] * 4096, list(range(256)), SamplingParams()) for slot in range(64)]  # megabytes
    outputs = await asyncio.gather(*(group.submit(StepInput(1, step, [], admit=admit)) for step in (120, 121, 122)))
    assert [output.step for output in outputs] == [120, 121, 122]

    assert not any(path.is_socket() for each in socket_directories() for path in each.iterdir())
    await assert_gone(group, processes(info))
    with pytest.raises(RankFailure, match="stopped"):
        await group.submit(step_input(123))
    assert group.failure is None
    await group.stop()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
async def test_a_killed_rank_fails_the_steps_in_flight_at_once(start: Start, rank: int) -> None:
    group, info = await start(FakeFactory(step_s=30))
    pending = [group.submit(step_input(step)) for step in range(3)]
    await asyncio.sleep(0.05)
    os.kill(processes(info)[rank].pid, signal.SIGKILL)
    failure = await asyncio.wait_for(group.wait_failed(), 60)
    assert failure.rank == rank
    assert "died" in failure.message
    errors = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(error) for error in errors] == [RankFailure] * 3
    assert group.failure is failure
    await assert_gone(group, processes(info))
    with pytest.raises(RankFailure, match=f"rank {rank} died"):
        await group.submit(step_input(9))


async def test_an_idle_groups_dead_rank_is_noticed_and_its_place_is_used_again(start: Start) -> None:
    first, before = await start(FakeFactory(expect_num_blocks=20), num_blocks=20)
    assert before.num_blocks == 20, "as requested"
    os.kill(processes(before)[1].pid, signal.SIGKILL)
    assert (await asyncio.wait_for(first.wait_failed(), 60)).rank == 1
    await assert_gone(first, processes(before))
    second, after = await start(epoch=2, num_blocks=50)
    assert after.num_blocks == 49, "the smallest rank's number of blocks"
    assert (await second.submit(step_input(0, epoch=2))).epoch == 2
    assert not {process.pid for process in processes(before)} & {process.pid for process in processes(after)}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
async def test_a_stopped_rank_is_named_at_the_step_deadline_and_killed(start: Start, rank: int) -> None:
    group, info = await start(limits=GroupLimits(start_timeout_s=120, step_timeout_s=10))
    await group.submit(step_input(0))
    os.kill(processes(info)[rank].pid, signal.SIGSTOP)
    pending = group.submit(step_input(1))
    failure = await asyncio.wait_for(group.wait_failed(), 60)
    assert failure.rank == rank
    assert "hangs: no answer to a step within 10 s" in failure.message
    if rank == 0:
        with pytest.raises(RankFailure):
            await pending
    await assert_gone(group, processes(info))


async def test_the_rank_that_raised_is_named_instead_of_the_one_whose_collective_failed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.driver.fan_out._SECOND_SIGN_S", 60.0)
    faults = (Fault(0, "collective", "prefill", at_step=0), Fault(1, "raise", "prefill", at_step=0, after_s=0.02))
    group, info = await start(FakeFactory(faults))
    with pytest.raises(RankFailure, match="rank 1 failed: ValueError"):
        await group.submit(step_input(0))
    await assert_gone(group, processes(info))


@ray.remote(num_cpus=0)
class Driver:
    """Owns a group, as a Serve replica does."""

    async def start(self, placement: PlacementGroup) -> tuple[int, GroupInfo]:
        self.group = RankGroup(CONFIG, placement, limits=LIMITS, runner_factory=FakeFactory(step_s=0.1))
        info = await self.group.start()
        self.pending = [self.group.submit(step_input(step, epoch=0)) for step in range(50)]
        return os.getpid(), info


@dataclass(frozen=True)
class TellsStore:
    """A runner factory that raises what it is told of the rendezvous."""

    def __call__(
        self, config: EngineConfig, rendezvous: RendezvousSpec, on_progress: Callable[[int, int], None]
    ) -> RankRunner:
        path = Path(rendezvous.order.store_path)
        mode = stat.S_IMODE(path.parent.stat().st_mode)
        raise CheckpointError(f"{rendezvous.call_store} {path.name} {mode:o}")


async def test_on_one_host_the_ranks_meet_in_a_private_file_and_no_port_takes_keys(start: Start) -> None:
    with pytest.raises(CheckpointError, match=r"^None store 700$"):
        await start(TellsStore())
    assert not socket_directories()


async def test_the_ranks_of_a_killed_driver_end(two_rank_placement: PlacementGroup) -> None:
    driver = Driver.remote()  # type: ignore[attr-defined]
    pid, info = await driver.start.remote(two_rank_placement)
    os.kill(pid, signal.SIGKILL)
    await until_true("the ranks have ended", lambda: not any(is_running(process) for process in processes(info)))
    remove_stale(parent_dir())  # as the next start does
    assert not socket_directories()
