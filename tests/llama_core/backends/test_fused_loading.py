"""The start of the fused backend: graphs that are captured while weights arrive."""

from typing import Any
from unittest.mock import patch

import pytest

from llama_core.backends import rank_loading
from llama_core.backends.parallel import Parallel, alone
from llama_core.errors import CheckpointError
from llama_core.weights.loader import planned_weights
from tests.conftest import GOLDEN
from tests.support.full_runs import examples
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_steps import assert_expected, requests_of, simulated, simulated_runner

MP1 = str(GOLDEN / "mp1")
NUM_OF_GROUP = examples(3, 6)
FORMER = 22  # cache blocks: of two sequences of the longest context


def test_graphs_that_are_captured_before_their_weights_arrive_give_the_same_tokens() -> None:
    """Weights are NaN meanwhile, and so is what warm-up writes to the cache."""
    requests = requests_of(2, NUM_OF_GROUP)
    assert_expected(simulated(alone("cpu"), MP1, requests, 2, 0.5, former_blocks=FORMER), MP1, 2, NUM_OF_GROUP)


class _Ordered(SimulatedDevice):
    """Notes what its start does, in order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.calls: list[str] = []

    def warm_up(self, works: list[Any]) -> None:
        self.calls.append("warm up")
        super().warm_up(works)

    def capture(self, work: Any) -> Any:
        self.calls += [] if self.calls[-1] == "capture" else ["capture"]
        return super().capture(work)


def started(parallel: Parallel, former_blocks: int) -> tuple[list[str], list[Any]]:
    """What the start of a rank did, and its collectives."""
    device = _Ordered()
    with patch.object(rank_loading, "planned_weights") as read:
        read.side_effect = lambda *args: noted(device, planned_weights(*args))
        simulated_runner(parallel, MP1, device, former_blocks=former_blocks, max_batch_size=2, max_step_tokens=16)
    return device.calls, device.collectives


def noted(device: _Ordered, weights: Any) -> Any:
    device.calls.append("read")
    yield from weights


def test_all_ranks_join_the_same_collectives_when_weights_arrive_after_the_graphs(ranks: Any) -> None:
    in_order = ranks(2).call(started, 0)
    beside = ranks(2).call(started, FORMER)
    assert [calls for calls, _ in in_order] == [["read", "warm up", "capture"]] * 2
    assert [calls for calls, _ in beside] == [["warm up", "capture", "read"]] * 2
    collectives = [found for _, found in (*in_order, *beside)]
    assert len(collectives[0]) > 20 and collectives == [collectives[0]] * 4


def test_a_load_that_fails_beside_the_captures_ends_the_start_with_its_own_error() -> None:
    def broken(*args: Any) -> Any:
        yield from list(planned_weights(*args))[:2]
        raise CheckpointError("model.bin: cut off")

    sizes = {"former_blocks": FORMER, "max_batch_size": 2, "max_step_tokens": 16}
    with patch.object(rank_loading, "planned_weights", broken), pytest.raises(CheckpointError, match="cut off"):
        simulated_runner(alone("cpu"), MP1, SimulatedDevice(), **sizes)
