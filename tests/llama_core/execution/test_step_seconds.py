"""How long ranks wait for each other and sample, as the backends in torch and for GPUs measure it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from llama_core.execution.fused.ops import TorchOps
from llama_core.execution.fused.step_clock import NUM_SUMS, StepClock, StepSeconds
from llama_core.execution.parallel import Parallel, alone
from llama_core.execution.reference.layers import OwnLayerTypes
from llama_core.execution.reference.stopwatch import CudaStopwatch, HostStopwatch
from llama_core.model_config import ModelConfig
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
    # With the backend in torch, the other ranks wait for rank 0's samples; the other one samples on each rank.
    waits_for_samples = NUM_STEPS * SAMPLING_S if kind == "torch" else 0
    assert seen[0].waited == pytest.approx(paused if slow == 1 else 0)
    assert seen[1].waited == pytest.approx(waits_for_samples + (paused if slow == 0 else 0))


@pytest.mark.parametrize("kind", ["fused", "torch"])
def test_a_rank_alone_samples_and_waits_for_nobody(kind: str) -> None:
    seen = spent(alone("cpu"), MP1, kind, 0)
    assert seen.sampled == pytest.approx(NUM_STEPS * SAMPLING_S) and seen.waited == 0


def test_layers_of_uneven_ranks_time_their_collectives() -> None:
    watch, config = CountingStopwatch(), ModelConfig(8, 1, 2, 2, 4, 16, 32, norm_eps=1e-5)
    types, meta = OwnLayerTypes(config, Parallel(0, 1, torch.device("meta")), watch), torch.device("meta")
    layers = [types.row(8, 8, 8, bias=True), types.embedding(), types.output(), types.column(8, 8, 8)]
    inputs = [torch.empty(3, 8, device=meta)] * 4
    inputs[1] = torch.zeros(3, dtype=torch.int64, device=meta)
    found = []
    for layer, x in zip(layers, inputs, strict=True):
        layer(x)
        found.append(watch.count)
    assert found == [1, 2, 3, 3]


def test_a_replayed_graph_reads_the_clock_anew() -> None:
    device, sums, seconds = SimulatedDevice(), torch.zeros(NUM_SUMS, dtype=torch.int64), StepSeconds()
    clock, x = StepClock(TorchOps(), sums), torch.ones(300_000)

    def work() -> None:
        with clock.waiting(3):
            x.sin_()

    graph = device.capture(work)
    sums.zero_()
    found = []
    for _ in range(3):
        graph.replay()
        device.synchronize()
        seconds.read(sums)
        found.append(seconds.waited)
    assert 0 < found[0] < found[1] < found[2] and seconds.sampled == 0


class CountingStopwatch(HostStopwatch):
    count = 0

    @contextmanager
    def timing(self) -> Iterator[None]:
        self.count += 1
        yield


class FakeEvent:
    """Reached when the device has come to it. Times in milliseconds."""

    now_ms = 0.0
    reached_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at_ms, FakeEvent.now_ms = FakeEvent.now_ms, FakeEvent.now_ms + 7

    def query(self) -> bool:
        return self.at_ms <= FakeEvent.reached_ms

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert other.query()
        return other.at_ms - self.at_ms


def test_events_are_read_when_the_device_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    watch = CudaStopwatch()
    for _ in range(3):
        with watch.timing():
            pass
    found = []
    for FakeEvent.reached_ms in (0.0, 6.9, 7.0, 30.0, 100.0, 100.0):
        watch.read()
        found.append(round(watch.seconds * 1e3))
    assert found == [0, 0, 7, 14, 21, 21]
