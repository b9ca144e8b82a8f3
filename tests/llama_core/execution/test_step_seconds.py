"""How long ranks wait for each other and sample, as the backends in torch and for GPUs measure it."""

from typing import Any

import pytest
import torch

from llama_core.execution.fused.ops import NUM_SUMS, StepClock, TorchOps
from llama_core.execution.parallel import alone
from tests.conftest import GOLDEN
from tests.support.simulated_device import SimulatedDevice
from tests.support.slow_ranks import LAYER_S, NUM_STEPS, SAMPLING_S, Spent, spent

MP1 = str(GOLDEN / "mp1")


@pytest.mark.parametrize(("kind", "slow"), [("fused", 1), ("torch", 0), ("torch", 1)])
def test_a_rank_waits_for_the_one_that_computes_slowly(ranks: Any, kind: str, slow: int) -> None:
    seen: list[Spent] = ranks(2).call(spent, MP1, kind, slow)
    paused = NUM_STEPS * seen[0].layers * LAYER_S
    assert [one.steps for one in seen] == [pytest.approx(paused + NUM_STEPS * SAMPLING_S)] * 2
    assert seen[0].sampled == pytest.approx(NUM_STEPS * SAMPLING_S) and seen[1].sampled == 0
    assert seen[0].waited == pytest.approx(paused if slow == 1 else 0)
    assert seen[1].waited == pytest.approx(paused if slow == 0 else 0)


@pytest.mark.parametrize("kind", ["fused", "torch"])
def test_a_rank_alone_samples_and_waits_for_nobody(kind: str) -> None:
    seen = spent(alone("cpu"), MP1, kind, 0)
    assert seen.sampled == pytest.approx(NUM_STEPS * SAMPLING_S) and seen.waited == 0


def test_a_replayed_graph_reads_the_clock_anew() -> None:
    device, sums = SimulatedDevice(), torch.zeros(NUM_SUMS, dtype=torch.int64)
    clock, x = StepClock(TorchOps(), sums), torch.ones(300_000)

    def work() -> None:
        with clock.waiting(3):
            x.sin_()

    graph = device.capture(work)
    sums.zero_()
    found = []
    for _ in range(3):
        graph()
        device.synchronize()
        found.append(int(sums[0]))
    assert 0 < found[0] < found[1] < found[2] and sums[1] == 0
