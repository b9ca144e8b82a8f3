"""The fused backend on a simulated device: work that runs late, graphs that share memory, and the order of collectives."""

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, call, patch

import pytest

from llama_core.backends.fused import backend as fused_backend
from llama_core.backends.parallel import Parallel, alone, leave
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit, StepInput
from tests.conftest import GOLDEN
from tests.support.full_runs import examples
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_steps import (
    SimulatedRun,
    assert_expected,
    requests_of,
    simulated,
    simulated_runner,
)

MP1 = str(GOLDEN / "mp1")
NUM_REQUESTS = examples(6, 10)  # of one rank
NUM_OF_GROUP = examples(3, 6)


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.full) for seed in (0, 1, 3, 4, 5))])
def test_tokens_are_right_however_late_the_device_computes(seed: int) -> None:
    requests = requests_of(seed, NUM_REQUESTS)
    run = simulated(alone("cpu"), MP1, requests, seed, eagerness=(0.0, 0.5, 0.9)[seed % 3])
    assert_expected(run, MP1, seed, NUM_REQUESTS)
    assert run.preemptions > 0 or seed != 2, "preemptions are part of the workload"


def names_around_leaving(parallel: Parallel) -> list[str]:
    """The backend's name, which counts its graphs, before a rank leaves, and when its group is destroyed. The group stays."""
    runner = simulated_runner(parallel, MP1, SimulatedDevice())
    names = [runner.backend.name]
    with patch("torch.distributed.destroy_process_group", lambda: names.append(runner.backend.name)):
        leave()
    return names


def test_a_rank_that_leaves_releases_its_graphs_before_it_destroys_the_group(ranks: Callable[[int], Any]) -> None:
    """NCCL waits for ever otherwise (pytorch#115388)."""
    for before, when_destroyed in ranks(2).call(names_around_leaving):
        assert "CUDA graphs" in before and when_destroyed == "fused"


def test_leaving_while_a_collective_waits_for_a_dead_peer_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    device, calls = SimulatedDevice(), Mock()
    calls.exit.side_effect = SystemExit
    runner = simulated_runner(alone("cpu"), MP1, device, max_batch_size=1, max_step_tokens=8)
    monkeypatch.setattr(fused_backend, "_have_graphs", {runner.backend})
    monkeypatch.setattr(fused_backend, "_LEAVE_LIMIT_S", 0.0)
    monkeypatch.setattr(os, "_exit", calls.exit)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.destroy_process_group", calls.destroy)
    device.queue(lambda: None)  # that this device never runs by itself
    waits = device.num_waits
    with pytest.raises(SystemExit):
        leave()
    assert calls.mock_calls == [call.exit(1)] and device.num_waits == waits
    device.synchronize()
    leave()
    assert calls.mock_calls[1:] == [call.destroy()] and runner.backend.name == "fused"


def test_a_step_is_one_copy_in_and_one_out_and_waits_for_nothing() -> None:
    """A step that admits a prompt and one of decodes alone, both in graphs."""
    device = SimulatedDevice()
    runner = simulated_runner(alone("cpu"), MP1, device)
    blocks = runner.config.blocks_per_sequence
    admit = [
        SlotInit(slot, [1, *range(5, 16)], list(range(slot * blocks, (slot + 1) * blocks)), SamplingParams(0.7))
        for slot in range(5)
    ]
    runner.step(StepInput(0, 1, [Row(slot, 0, 12, True) for slot in range(4)], admit=admit[:4]))
    rows = [Row(slot, 12, 1, True) for slot in range(4)]
    for batch in (StepInput(0, 2, [*rows, Row(4, 0, 12, True)], admit=admit[4:]), StepInput(0, 3, rows)):
        before = device.num_copies, device.num_waits, device.num_replays, len(device.host_accesses)
        pending = runner.start(batch)
        assert (device.num_copies, device.num_waits, device.num_replays, len(device.host_accesses)) == (
            before[0] + 2,
            before[1],
            before[2] + 2,
            before[3],
        )
        assert not pending.is_done
        pending.result()
        assert len(device.host_accesses) == before[3]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_all_ranks_join_the_same_collectives_in_the_same_order(ranks: Any, world_size: int) -> None:
    runs: list[SimulatedRun] = ranks(world_size).call(simulated, MP1, requests_of(7, NUM_OF_GROUP), 7, 0.3)
    for run in runs:
        assert_expected(run, MP1, 7, NUM_OF_GROUP)
        assert run.collectives == runs[0].collectives
    assert len(runs[0].collectives) > 100
