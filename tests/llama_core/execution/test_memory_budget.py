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


class DeviceMemory:
    """GPU memory of 2,000 bytes: what is free at each reading, the last for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
        self._free, self.slept = list(free), 0.0
        monkeypatch.setattr(torch.cuda, "mem_get_info", self._read)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(time, "sleep", self._sleep)
        monkeypatch.setattr(time, "monotonic", lambda: self.slept)

    def _read(self, device: torch.device) -> tuple[int, int]:
        return self._free[0], 2000

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


def cuda_runner(former_blocks: int, deadline: float) -> ModelRunner:
    """Blocks of 10 bytes, of which a batch of full sequences needs 4 * 13, and steps that take 100."""
    config = EngineConfig("", 640, 192, 4, device="cuda")
    backend = Mock(cache_block_bytes=10, weight_bytes=800, **{"unallocated_bytes.return_value": 100})
    model = Mock(longest_window=0)
    former = FormerCache(former_blocks, deadline)
    return ModelRunner(LoadedRank(config, model, CUDA, Mock(rules=[]), backend, Mock(), former))


@pytest.mark.parametrize(
    ("free", "former", "blocks", "slept_s"),
    # Of 2,000 bytes, 200 stay free and a step takes 100: 30 blocks need 600.
    [((450, 500, 600, 900), 30, 30, 2 * memory._DEVICE_POLL_S), ((500,), 30, 20, 5.0), ((500,), 0, 20, 0.0)],
    ids=["freed", "never freed", "first ranks"],
)
def test_new_ranks_wait_a_while_for_the_former_blocks_and_first_ranks_do_not(
    free: tuple[int, ...], former: int, blocks: int, slept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = DeviceMemory(monkeypatch, *free)
    assert cuda_runner(former, deadline=5.0).max_num_blocks() == blocks
    assert seen.slept == pytest.approx(slept_s, abs=0.1 if slept_s == 5.0 else 1e-9)


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


@pytest.mark.parametrize("backend", ["native", "torch"])
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
