"""Memory: what does not fit is refused before it is allocated, and the context follows from what is free."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from llama_core.backends import memory_budget as memory
from llama_core.backends.native import backend as native
from llama_core.backends.parallel import Parallel, alone
from llama_core.backends.runner import ModelRunner
from llama_core.config import BackendName, DType, EngineConfig
from llama_core.errors import ConfigError
from tests.conftest import GOLDEN
from tests.support.plain_model import decoder
from tests.support.plans import plan_of


def test_weights_that_do_not_fit_are_refused_with_need_and_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(ckpt_dir=str(GOLDEN / "mp2"), vocab_size=640, max_seq_len=64, max_batch_size=2, device="cpu")
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 100_000)
    with pytest.raises(
        ConfigError, match=r"1 of 1 ranks here need [\d,]+ bytes each, 100,000 are free: use more ranks"
    ):
        ModelRunner.load(config, alone("cpu"))


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
EIGHT_KV_HEADS = decoder(
    dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=1024, head_dim=128, hidden_dim=14336, norm_eps=1e-5
)


def planned_context(num_ranks: int, **fields: Any) -> int:
    """The context that all ranks of a group choose."""
    config = replace(WITHOUT_CONTEXT, max_seq_len=10**6, **fields)
    contexts = [
        memory.fit_context(
            config,
            EIGHT_KV_HEADS,
            torch.bfloat16,
            lambda ranks: plan_of(EIGHT_KV_HEADS, lambda name: "dense", "auto", "bfloat16", ranks),
            Parallel(rank, num_ranks, torch.device("cpu")),
            native.step_bytes,
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
