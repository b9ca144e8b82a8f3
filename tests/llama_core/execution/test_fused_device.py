"""The fused backend on a simulated device: work that runs late, graphs that share memory, and the order of collectives."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, call, patch

import numpy as np
import pytest
import torch

from llama_core.checkpoint.loader import planned_weights
from llama_core.errors import CheckpointError
from llama_core.execution import fused, rank_loading
from llama_core.execution.fused import backend as fused_backend
from llama_core.execution.fused.backend import FusedBackend
from llama_core.execution.fused.device import CudaDevice
from llama_core.execution.parallel import Parallel, alone, leave
from llama_core.execution.runner import ModelRunner
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit, StepInput
from tests.conftest import GOLDEN
from tests.support import on_ranks
from tests.support.full_runs import examples
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_steps import (
    LateMasks,
    SimulatedRun,
    expected_masks,
    requests_of,
    simulated,
    simulated_masks,
    simulated_runner,
)

MP1 = str(GOLDEN / "mp1")
NUM_REQUESTS = examples(6, 10)  # of one rank
NUM_OF_GROUP = examples(3, 6)


@cache
def expected_outputs(seed: int, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Each request alone, on the reference backend."""
    outputs, logprobs = [], []
    for request in requests_of(seed, count):
        alone_run = on_ranks.serve(alone("cpu"), MP1, [request], backend="torch")
        outputs += alone_run["outputs"]
        logprobs += alone_run["logprobs"]
    return outputs, logprobs


def assert_expected(run: SimulatedRun, seed: int, count: int) -> None:
    outputs, logprobs = expected_outputs(seed, count)
    assert run.outputs == outputs
    for mine, theirs in zip(run.logprobs, logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert run.replays > 0


# In each run, the masks below are computed on a device that is never eager, and preemptions on one that is half of the time.
@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.full) for seed in (0, 1, 3, 4, 5))])
def test_tokens_are_right_however_late_the_device_computes(seed: int) -> None:
    requests = requests_of(seed, NUM_REQUESTS)
    run = simulated(alone("cpu"), MP1, requests, seed, eagerness=(0.0, 0.5, 0.9)[seed % 3])
    assert_expected(run, seed, NUM_REQUESTS)
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


def test_a_rank_that_leaves_while_a_collective_waits_for_a_dead_peer_ends_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.parametrize("eagerness", [0.0, 0.6])
def test_masks_change_the_tokens_of_their_step_however_late_the_device_computes(eagerness: float) -> None:
    tokens, _ = simulated_masks(alone("cpu"), MP1, 5, eagerness)
    assert tokens == expected_masks(MP1)


def test_masks_are_known_to_rank_0_alone_and_all_ranks_join_its_collectives(ranks: Any) -> None:
    runs = ranks(2).call(simulated_masks, MP1, 6, 0.4)
    assert runs[0][0] == runs[1][0] == expected_masks(MP1)
    assert runs[0][1] == runs[1][1]


def test_rules_masks_and_logprobs_take_one_copy_more_each_and_no_wait_for_the_device() -> None:
    device = SimulatedDevice()
    runner = simulated_runner(alone("cpu"), MP1, device)
    params = SamplingParams(0.8, repetition_penalty=1.3, logit_bias=((7, 2.0),), logprobs=3, min_tokens=2)
    runner.step(StepInput(0, 0, [Row(0, 0, 3, True)], admit=[SlotInit(0, [1, 5, 9], [0], params, delayed=(2,))]))
    masks = LateMasks(np.random.default_rng(1), 1, runner.config.vocab_size)
    rows = [Row(0, 3, 1, True)]
    for keep_logits, given, copies, replays in ((False, None, 2, 2), (True, None, 3, 3), (True, masks, 4, 3)):
        before = device.num_copies, device.num_replays, device.num_waits, len(device.host_accesses)
        with torch.inference_mode():
            pending = runner.backend.start(rows, keep_logits=keep_logits, masks=given)
            runner.backend.queue_samples()
        assert device.num_copies == before[0] + copies and device.num_replays == before[1] + replays
        assert (device.num_waits, len(device.host_accesses)) == before[2:]
        assert (pending.result().logprobs is not None) == keep_logits
        assert len(device.host_accesses) == before[3]


def test_changes_beyond_the_buffer_take_one_copy_more_and_no_wait() -> None:
    """All slots are admitted at once with long texts, as after a restart."""
    device = SimulatedDevice()
    runner = simulated_runner(alone("cpu"), MP1, device)
    blocks = runner.config.blocks_per_sequence
    admit = [
        SlotInit(
            slot,
            [1, *range(5 + slot, 154 + slot)],
            list(range(slot * blocks, (slot + 1) * blocks)),
            SamplingParams(0.0),
        )
        for slot in range(8)
    ]
    batch = StepInput(0, 1, [Row(slot, 0, 5 + slot, True) for slot in range(7)], admit=admit)
    before = device.num_copies, device.num_waits
    pending = runner.start(batch)
    assert (device.num_copies, device.num_waits) == (before[0] + 3, before[1])
    assert pending.result().tokens == on_ranks.new_runner(alone("cpu"), MP1, backend="torch").step(batch).tokens


def test_prompt_logprobs_wait_in_declared_calls_and_read_no_token_of_the_device() -> None:
    device = SimulatedDevice()
    runner = simulated_runner(alone("cpu"), MP1, device)
    init = SlotInit(0, [1, *range(5, 16)], [0], SamplingParams(0.0, logprobs=1), prompt_logprobs=True)
    batch = StepInput(0, 1, [Row(0, 0, 12, True)], admit=[init])
    waits, slots = device.num_waits, runner._slots
    with patch.object(slots, "tokens", None):
        [found] = runner.step(batch).prompt_logprobs
    assert device.num_waits == waits + 2, "for the step, and for the logits of its tokens"
    [expected] = on_ranks.new_runner(alone("cpu"), MP1, backend="torch").step(batch).prompt_logprobs
    assert found[:2] == expected[:2]
    assert [each.logprob for each in found.values] == pytest.approx(
        [each.logprob for each in expected.values], abs=1e-4
    )


FORMER = 22  # cache blocks: of two sequences of the longest context


def test_graphs_that_are_captured_before_their_weights_arrive_give_the_same_tokens() -> None:
    """Weights are NaN meanwhile, and so is what warm-up writes to the cache."""
    requests = requests_of(2, NUM_OF_GROUP)
    assert_expected(simulated(alone("cpu"), MP1, requests, 2, 0.5, former_blocks=FORMER), 2, NUM_OF_GROUP)


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


def test_a_warm_up_that_fails_beside_the_load_ends_it_and_the_start() -> None:
    read = []

    def weights(*args: Any) -> Any:
        for name, weight in planned_weights(*args):
            read.append(name)
            yield name, weight

    sizes = {"former_blocks": FORMER, "max_batch_size": 2, "max_step_tokens": 16}
    device = SimulatedDevice()
    with (
        patch.object(rank_loading, "planned_weights", weights),
        patch.object(device, "warm_up", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        simulated_runner(alone("cpu"), MP1, device, **sizes)
    assert len(read) == 1, "the rest is not read"


def test_graphs_that_cannot_be_captured_beside_the_load_are_captured_after_it() -> None:
    device = _Ordered()
    capture = device.capture

    def refused_at_first(work: Any) -> Any:
        if device.calls.count("warm up") == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(work)

    sizes = {"former_blocks": FORMER, "max_batch_size": 2, "max_step_tokens": 16}
    with patch.object(device, "capture", refused_at_first):
        runner = simulated_runner(alone("cpu"), MP1, device, **sizes)
    assert "CUDA graphs" in runner.backend.name and device.calls == ["warm up", "warm up", "capture"]


def test_another_threads_work_has_its_device_and_stream_and_ends_with_what_it_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = MagicMock()
    errors: list[Exception] = []

    def work() -> None:
        cuda.work(torch.is_inference_mode_enabled(), threading.get_ident() != first)
        if errors:
            raise errors[0]

    first = threading.get_ident()
    for name in ("synchronize", "Stream", "set_device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    device = CudaDevice(torch.device("cuda", 3))
    device.start_in_thread(work).result()
    stream = cuda.Stream()
    expected = [call.synchronize(), call.Stream(), call.set_device(3), call.stream(stream), call.stream().__enter__()]
    expected += [call.work(True, True), call.Stream().synchronize(), call.stream().__exit__(None, None, None)]
    assert cuda.mock_calls[: len(expected)] == expected
    errors.append(CheckpointError("model.bin: cut off"))
    with pytest.raises(CheckpointError, match="cut off"):
        device.start_in_thread(work).result()


CALLS_OF_CUDA = {
    "execution/fused/peer_memory.py": {"synchronize", "device_count", "can_device_access_peer"},
    "execution/fused/all_reduce.py": {"get_device_properties"},
    "execution/fused/attention_kernels.py": {"get_device_properties"},
    "execution/memory_budget.py": {"mem_get_info", "empty_cache"},
    "execution/parallel.py": {"is_available", "device_count", "get_device_name", "set_device"},
    "execution/runner.py": {"memory_allocated"},  # a count that torch keeps on the host
    "execution/reference/stopwatch.py": {"Event"},  # no FusedBackend
    "checkpoint/uploads.py": {"Event"},
}


def test_only_the_device_calls_cuda_while_the_backend_serves() -> None:
    """The others do so at the start, or ask torch for what it knows."""
    root = Path(fused.__file__).parents[2]
    found = {
        path.relative_to(root).as_posix(): set(re.findall(r"torch\.cuda\.(\w+)", path.read_text()))
        for path in root.rglob("*.py")
    }
    del found["execution/fused/device.py"]
    assert {name: calls for name, calls in found.items() if calls} == CALLS_OF_CUDA


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
from llama_core.execution.fused.preloading import import_kernels
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


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_all_ranks_join_the_same_collectives_in_the_same_order(ranks: Any, world_size: int) -> None:
    runs: list[SimulatedRun] = ranks(world_size).call(simulated, MP1, requests_of(7, NUM_OF_GROUP), 7, 0.3)
    for run in runs:
        assert_expected(run, 7, NUM_OF_GROUP)
        assert run.collectives == runs[0].collectives
    assert len(runs[0].collectives) > 100


@pytest.mark.parametrize("sizes", [(8, 8), (8, 9), (1, 1), pytest.param((40, 600), marks=pytest.mark.full)], ids=str)
def test_graphs_are_captured_for_any_sizes_of_batch_and_step(sizes: tuple[int, int]) -> None:
    """Buckets of decodes count drafts, and so may have more tokens than a step."""
    max_batch_size, max_step_tokens = sizes
    device = SimulatedDevice()
    fields = {"max_batch_size": max_batch_size, "max_step_tokens": max_step_tokens}
    runner = simulated_runner(alone("cpu"), MP1, device, **fields)
    assert "graphs" in runner.backend.name


def test_the_device_refuses_to_capture_what_waits_for_the_host() -> None:
    values = torch.ones(3)
    with pytest.raises(RuntimeError, match="while a graph is captured"):
        SimulatedDevice().capture(lambda: values.sum().item())


def test_a_replay_clobbers_what_an_earlier_one_left_in_the_graphs_memory() -> None:
    device, source, kept = SimulatedDevice(), torch.ones(3), torch.zeros(3)
    inner = []

    def work() -> None:
        inner.append(source * 2)
        kept.copy_(inner[-1])

    graph = device.capture(work)
    kept.zero_()
    graph.replay()
    assert kept.tolist() == [0, 0, 0]
    device.synchronize()
    assert kept.tolist() == [2, 2, 2] and inner[-1].isnan().all()


def test_a_copy_reads_its_source_when_it_runs() -> None:
    device = SimulatedDevice()
    sent, received = device.page_locked(2), torch.zeros(2, dtype=torch.int64)
    sent[0] = 1
    device.copy(received, sent)
    sent[0] = 2
    event = device.record()
    assert not event.is_reached()
    event.wait()
    assert received.tolist() == [2, 0]
