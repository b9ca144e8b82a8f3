"""A rank refuses weights that do not fit before it allocates memory for them."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from llama_core import host_memory
from llama_core.config import BackendName, DType, EngineConfig
from llama_core.errors import ConfigError
from llama_core.execution import memory_budget as memory
from llama_core.execution.fused import step_memory as fused
from llama_core.execution.native import backend as native
from llama_core.execution.parallel import Parallel, alone
from llama_core.execution.rank_loading import FormerCache, LoadedRank
from llama_core.execution.runner import ModelRunner
from llama_core.execution.weight_plan import plan_weights
from llama_core.model_config import ModelConfig
from tests.conftest import GOLDEN


def test_weights_that_do_not_fit_are_refused_with_need_and_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(ckpt_dir=str(GOLDEN / "mp2"), vocab_size=640, max_seq_len=64, max_batch_size=2, device="cpu")
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 100_000)
    with pytest.raises(
        ConfigError, match=r"1 of 1 ranks here need [\d,]+ bytes each, 100,000 are free: use more ranks"
    ):
        ModelRunner.load(config, alone("cpu"))


def test_ranks_that_share_a_host_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 150)
    monkeypatch.setattr(memory, "smallest", lambda parallel, value: value)
    parallel = Parallel(0, 2, torch.device("cpu"))
    monkeypatch.setattr(memory, "ranks_with", lambda parallel, value: [0])
    memory.check_weights_fit(100, parallel)
    monkeypatch.setattr(memory, "ranks_with", lambda parallel, value: [0, 1])
    with pytest.raises(ConfigError, match="2 of 2 ranks here need 100 bytes each, 150 are free"):
        memory.check_weights_fit(100, parallel)


def test_a_rank_waits_for_the_gpu_memory_of_the_process_that_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10, 10, 60, 120, 120])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 200))
    memory.check_weights_fit(100, Parallel(0, 1, torch.device("cuda")))
    assert next(free) == 120  # it did not read on after there was enough


def test_gpu_memory_that_stays_taken_is_refused_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "DEVICE_WAIT_S", 0.12)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 200))
    with pytest.raises(ConfigError, match="1 of 1 ranks here need 100 bytes each, 10 are free"):
        memory.check_weights_fit(100, Parallel(0, 1, torch.device("cuda")))


class DeviceMemory:
    """GPU memory of 2,000 bytes: what is free at each reading, the last for ever, and what torch keeps for later tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *free: int, kept: int = 0) -> None:
        self._free, self._kept, self.slept = list(free), kept, 0.0
        monkeypatch.setattr(torch.cuda, "mem_get_info", self._read)
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty)
        monkeypatch.setattr(time, "sleep", self._sleep)
        monkeypatch.setattr(time, "monotonic", lambda: self.slept)

    def _read(self, device: torch.device) -> tuple[int, int]:
        return self._free[0] - self._kept, 2000

    def _empty(self) -> None:
        self._kept = 0

    def _sleep(self, seconds: float) -> None:
        self.slept += seconds
        del self._free[: len(self._free) > 1]


CUDA = Parallel(0, 1, torch.device("cuda"))


@pytest.mark.parametrize(
    ("former", "waits"),
    [(0, 0), (100, 0), (500, 1), (1300, 3), (1700, 0)],
    ids=["first", "fits", "one", "all", "fewer ranks"],
)
def test_loading_begins_when_the_weights_and_the_former_cache_have_room(
    former: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a GPU cannot have so large a cache beside these weights, it is not waited for."""
    seen = DeviceMemory(monkeypatch, 300, 700, 900, 1500)
    memory.check_weights_fit(200, CUDA, former)
    assert seen.slept == pytest.approx(waits * memory._DEVICE_POLL_S)


def test_a_cache_that_is_never_freed_delays_loading_and_does_not_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = DeviceMemory(monkeypatch, 300)
    memory.check_weights_fit(200, CUDA, 1300)
    assert seen.slept == pytest.approx(memory.DEVICE_WAIT_S, abs=0.1)


def cuda_runner(former_blocks: int, deadline: float) -> ModelRunner:
    """Blocks of 10 bytes, of which a batch of full sequences needs 4 * 13, and steps that take 100."""
    config = EngineConfig("", 640, 192, 4, device="cuda")
    backend = Mock(cache_block_bytes=10, weight_bytes=800, **{"unallocated_bytes.return_value": 100})
    model = Mock(longest_window=0)
    former = FormerCache(former_blocks, deadline)
    return ModelRunner(LoadedRank(config, model, CUDA, Mock(rules=[]), backend, Mock(), former))


def test_new_ranks_keep_the_former_blocks_once_the_memory_of_the_dead_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 2,000 bytes, 200 stay free and a step takes 100: 30 blocks need 600.
    seen = DeviceMemory(monkeypatch, 450, 500, 600, 900)
    assert cuda_runner(30, deadline=5.0).max_num_blocks() == 30
    assert seen.slept == pytest.approx(2 * memory._DEVICE_POLL_S)


def test_new_ranks_take_what_there_is_after_a_while_and_first_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = DeviceMemory(monkeypatch, 500)
    assert cuda_runner(30, deadline=5.0).max_num_blocks() == 20
    assert seen.slept == pytest.approx(5.0, abs=0.1)
    seen.slept = 0.0
    assert cuda_runner(0, deadline=5.0).max_num_blocks() == 20 and seen.slept == 0.0


def test_fewer_ranks_do_not_wait_for_a_cache_for_which_their_gpu_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = DeviceMemory(monkeypatch, 1200)  # all but the weights
    assert cuda_runner(100, deadline=5.0).max_num_blocks() == 52 and seen.slept == 0.0


def test_the_cache_has_the_memory_of_loadings_temporary_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    DeviceMemory(monkeypatch, 600, kept=120)
    assert cuda_runner(0, deadline=0.0).max_num_blocks() == 30


@pytest.mark.parametrize(
    ("free", "loading", "headroom", "room", "slept"),
    [
        ([694], 50, True, True, 0),  # a tenth of 2,000 bytes stays free, but for 3 %
        ([693], 50, True, False, 100),
        ([300, 694], 50, True, True, 1),
        ([709], 210, True, False, 0),
        ([710], 210, True, True, 0),
        ([549], 50, False, False, 0),
        ([550], 50, False, True, 0),
        ([499], 0, False, False, 100),
    ],
)
def test_the_former_cache_is_allocated_before_weights_are_read_where_reading_them_has_room(
    free: list[int], loading: int, headroom: bool, room: bool, slept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = DeviceMemory(monkeypatch, *free)
    about: dict[str, Any] = {"taken_bytes": 800, "keeps_headroom": headroom, "deadline": 5.0}
    assert memory.has_room_for_former(CUDA, 500, loading, **about) == room
    assert seen.slept == pytest.approx(slept * memory._DEVICE_POLL_S, abs=0.1)
    seen.slept = 0.0
    assert not memory.has_room_for_former(CUDA, 1201, loading, **about) and seen.slept == 0.0, "the GPU is too small"
    assert memory.has_room_for_former(alone("cpu"), 10**15, loading, **about)


def test_loading_passes_twice_the_largest_weight_and_five_times_in_float32_where_codes_are_computed() -> None:
    model, ranks = ModelConfig(64, 2, 4, 4, 16, 160, 1000), Parallel(1, 2, CUDA.device)
    dense = plan_weights(model, lambda name: "dense", "none", "bfloat16", 2)
    quantized = plan_weights(model, lambda name: "dense", "int8", "bfloat16", 2)
    assert memory.loading_bytes(model, dense, ranks, torch.bfloat16) == 500 * 64 * 2 * 2
    assert memory.loading_bytes(model, quantized, ranks, torch.bfloat16) == 500 * 64 * 5 * 4


@pytest.mark.parametrize("version", [0, 1], ids=["cgroup v2", "v1"])
def test_a_containers_limit_counts_and_its_file_cache_is_free_memory(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, limit, used, (inactive, active) = host_memory.CGROUPS[version]
    monkeypatch.setattr(host_memory, "CGROUPS", ((str(tmp_path), limit, used, (inactive, active)),))
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / used).write_text("900000\n")
    (tmp_path / "memory.stat").write_text(f"anon 100000\n{inactive} 500000\n{active} 300000\n")
    assert host_memory.available_host_bytes() == 900_000
    (tmp_path / limit).write_text("max\n")
    assert host_memory.available_host_bytes() > 1_000_000


WITHOUT_CONTEXT = EngineConfig(
    ckpt_dir=str(GOLDEN / "mp2"),
    vocab_size=640,
    max_seq_len=100_000,
    max_batch_size=2,
    device="cpu",
    dtype="float32",
    lowers_max_seq_len=True,
)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_context_that_was_not_asked_for_is_lowered_to_what_memory_holds(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100_000_000
    monkeypatch.setattr(memory, "available_host_bytes", lambda: free)
    runner = ModelRunner.load(replace(WITHOUT_CONTEXT, backend=backend), alone("cpu"))
    context = runner.config.max_seq_len
    assert 512 < context < 100_000 and runner.report.max_seq_len == context
    free -= runner.backend.weight_bytes
    assert runner.max_num_blocks() >= runner.config.blocks_per_sequence, "one sequence of the context has room"


@pytest.mark.parametrize("window", [0, 16])
@pytest.mark.parametrize("kv_cache_bytes", [None, 2**20])
def test_the_rotary_table_and_the_slots_count(
    window: int, kv_cache_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sliding window bounds the cache, and no other array of a long context."""
    free = 2**30
    monkeypatch.setattr(memory, "available_host_bytes", lambda: free)
    model = ModelConfig(64, 2, 4, 2, 16, 96, 640, windows=(window,) * 2)
    config = replace(WITHOUT_CONTEXT, max_seq_len=2**31 - 1, kv_cache_bytes=kv_cache_bytes)
    context = memory.fit_context(
        config,
        model,
        torch.float32,
        lambda ranks: plan_weights(model, lambda name: "dense", "auto", "float32", ranks),
        alone("cpu"),
        native.step_bytes,
    ).max_seq_len
    table, tokens = 4 * model.head_dim * context, 8 * config.max_batch_size * context
    assert context > 512 and table + tokens < free
    assert not window or context > 1_000_000, "the cache takes little"


def test_the_context_follows_the_memory_that_the_operator_gives_the_cache() -> None:
    config = replace(WITHOUT_CONTEXT, kv_cache_bytes=2**20)
    runner = ModelRunner.load(config, alone("cpu"))
    assert runner.config.max_seq_len == 2**20 // runner.backend.cache_block_bytes * 16
    assert ModelRunner.load(replace(config, max_seq_len=64), alone("cpu")).config.max_seq_len == 64


def test_too_little_memory_for_the_least_context_is_refused() -> None:
    runner = ModelRunner.load(replace(WITHOUT_CONTEXT, kv_cache_bytes=10_000), alone("cpu"))
    with pytest.raises(ConfigError, match=r"max_seq_len 512 needs .* lower max_seq_len, or give kv_cache_bytes"):
        runner.max_num_blocks()


# Llama 3 8B's shapes; nothing is loaded.
EIGHT_KV_HEADS = ModelConfig(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=1024, head_dim=128, hidden_dim=14336, norm_eps=1e-5
)


def planned_context(num_ranks: int, backend: Any = native, **fields: Any) -> int:
    """The context that all ranks of a group choose."""
    config = replace(WITHOUT_CONTEXT, max_seq_len=10**6, **fields)
    contexts = [
        memory.fit_context(
            config,
            EIGHT_KV_HEADS,
            torch.bfloat16,
            lambda ranks: plan_weights(EIGHT_KV_HEADS, lambda name: "dense", "auto", "bfloat16", ranks),
            Parallel(rank, num_ranks, torch.device("cpu")),
            backend.step_bytes,
        ).max_seq_len
        for rank in range(num_ranks)
    ]
    return min(contexts)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_context_leaves_room_for_a_group_of_one_rank_less(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "smallest", lambda parallel, value: value)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 10**12)  # kv_cache_bytes alone bounds the context
    chosen = planned_context(num_ranks, kv_cache_bytes=2**31, serves_with_fewer_ranks=True)
    assert chosen == planned_context(num_ranks - 1, kv_cache_bytes=2**31)
    assert chosen < planned_context(num_ranks, kv_cache_bytes=2**31), "all ranks would hold more"


def test_a_smaller_group_that_could_not_serve_does_not_lower_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "smallest", lambda parallel, value: value)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 22 * 10**9)
    assert planned_context(8) > 512
    assert planned_context(8, serves_with_fewer_ranks=True) <= planned_context(8)
    monkeypatch.setattr(memory, "free_cache_bytes", lambda at, planned: 10**9 if at.world_size == 8 else 0)
    assert planned_context(8, serves_with_fewer_ranks=True) == planned_context(8) > 512


def test_working_memory_that_grows_with_the_context_shortens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask of a prompt on the fused backend takes more than its cache."""
    monkeypatch.setattr(memory, "free_cache_bytes", lambda at, planned: 10**10)
    config = replace(WITHOUT_CONTEXT, max_seq_len=planned_context(1, fused))
    need = fused.step_bytes(config, EIGHT_KV_HEADS, Parallel(0, 1, torch.device("cpu")), torch.bfloat16)
    assert config.max_seq_len > 512 and need + config.max_seq_len * 131_072 <= 10**10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("max_step_tokens", [16, 2048])
def test_the_native_backend_states_at_least_the_memory_that_it_takes(
    dtype: DType, quantization: str, max_step_tokens: int
) -> None:
    config = replace(
        WITHOUT_CONTEXT,
        max_seq_len=4096,
        dtype=dtype,
        quantization=quantization,
        max_step_tokens=max_step_tokens,
        backend="native",
    )
    runner = ModelRunner.load(config, alone("cpu"))
    stated = native.step_bytes(config, runner.model_config, alone("cpu"), getattr(torch, dtype))
    assert stated >= runner.backend.working_bytes


@pytest.mark.parametrize("backend", ["native", "torch", "fused"])
def test_a_context_that_the_ranks_chose_is_lowered_again_where_memory_became_less(
    backend: BackendName, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100_000_000
    monkeypatch.setattr(memory, "available_host_bytes", lambda: free)
    runner = ModelRunner.load(replace(WITHOUT_CONTEXT, backend=backend), alone("cpu"))
    planned = runner.config.max_seq_len
    free //= 2
    num_blocks = runner.max_num_blocks()
    assert 512 < runner.config.max_seq_len < planned
    assert runner.report.max_seq_len == runner.config.max_seq_len
    assert num_blocks >= runner.config.blocks_per_sequence
    runner.allocate_cache(num_blocks)
    runner.warm_up()


def test_a_device_without_memory_for_the_cache_or_the_warm_up_says_what_to_lower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ModelRunner.load(WITHOUT_CONTEXT, alone("cpu"))
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nProcess 7 has 70 GiB in use")
    monkeypatch.setattr(runner.backend, "allocate_cache", Mock(side_effect=full))
    with pytest.raises(
        ConfigError,
        match=r"does not hold 9 blocks of cache .*allocate 2\.00 GiB\.\): lower kv_cache_bytes, max_batch_size",
    ) as raised:
        runner.allocate_cache(9)
    assert raised.value.param == "kv_cache_bytes"


def test_a_device_without_memory_for_the_cache_of_the_ranks_before_is_at_fault_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver names the rank of such an error, and goes on without its device."""
    runner = ModelRunner.load(WITHOUT_CONTEXT, alone("cpu"), former_blocks=9)
    monkeypatch.setattr(
        runner.backend, "allocate_cache", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    )
    with pytest.raises(torch.OutOfMemoryError):
        runner.allocate_cache(9)
