"""The start of the fused backend: kernels that are imported in advance, and graphs that are captured while weights arrive."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from llama_core.checkpoint.loader import planned_weights
from llama_core.errors import CheckpointError
from llama_core.execution import fused, rank_loading
from llama_core.execution.fused.backend import FusedBackend
from llama_core.execution.parallel import Parallel, alone
from llama_core.execution.runner import ModelRunner
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


def test_the_cache_of_the_ranks_before_is_kept_unless_the_driver_asks_for_another() -> None:
    sizes = {"former_blocks": FORMER, "max_batch_size": 2, "max_step_tokens": 16}
    for asked, warm_ups in ((FORMER, 1), (FORMER - 1, 2)):
        device = _Ordered()
        with patch.object(ModelRunner, "max_num_blocks", lambda runner, asked=asked: asked):
            backend = simulated_runner(alone("cpu"), MP1, device, **sizes).backend
        assert device.calls == ["warm up", "capture"] * warm_ups and "CUDA graphs" in backend.name
        assert isinstance(backend, FusedBackend) and backend._cache is not None
        assert backend._cache.keys.shape[1] == asked + 1
    assert simulated_runner(alone("cpu"), MP1, _Ordered(), **sizes).max_num_blocks() == FORMER


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


def room_on_rank_0_alone(parallel: Parallel) -> list[str]:
    with patch.object(rank_loading, "has_room_for_former", lambda *args, **options: parallel.rank == 0):
        return started(parallel, FORMER)[0]


def test_no_rank_captures_before_its_weights_arrive_where_one_has_no_room_for_the_cache(ranks: Any) -> None:
    assert ranks(2).call(room_on_rank_0_alone) == [["read", "warm up", "capture"]] * 2


def test_a_load_that_fails_beside_the_captures_ends_the_start_with_its_own_error() -> None:
    def broken(*args: Any) -> Any:
        yield from list(planned_weights(*args))[:2]
        raise CheckpointError("model.bin: cut off")

    sizes = {"former_blocks": FORMER, "max_batch_size": 2, "max_step_tokens": 16}
    with patch.object(rank_loading, "planned_weights", broken), pytest.raises(CheckpointError, match="cut off"):
        simulated_runner(alone("cpu"), MP1, SimulatedDevice(), **sizes)


def test_kernels_are_imported_in_advance_without_a_context() -> None:
    """All modules with kernels, and the hashes that first launches look for; neither CUDA nor Triton's driver, which would open
    it, is set up."""
    root = Path(fused.__file__).parents[3]
    modules = [
        path.relative_to(root).with_suffix("").as_posix().replace("/", ".")
        for path in root.joinpath("llama_core").rglob("*.py")
        if re.search(r"^import triton$", path.read_text(), re.MULTILINE)
    ]
    assert len(modules) > 10
    code = f"""
import sys
from llama_core.execution.fused.device import import_kernels
import_kernels()
import torch, triton
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction
assert triton_key.cache_info().currsize == 1
kernels = [each for name in {modules!r} for each in vars(sys.modules[name]).values() if isinstance(each, JITFunction)]
assert len(kernels) > 40 and all(kernel.hash for kernel in kernels)
assert not set({modules!r}) - set(sys.modules), "a kernel is imported after a failure"
assert not torch.cuda.is_initialized()
assert triton.runtime.driver._active is None and triton.runtime.driver._default is None
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
