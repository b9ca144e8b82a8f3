"""Every switch of ModelConfig in torch: logits near a plain forward in float64, on any ranks."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from llama_core.backends.parallel import Parallel, alone
from llama_core.model_config import ModelConfig
from llama_core.scheduling.step import Row, SlotInit, StepInput
from tests.llama_core.backends.test_switches import GREEDY, SWITCHES, TOKENS, model_with
from tests.support import plain_model

COMBINED = ("none", "all", "Qwen2", "Qwen3")  # more ranks than 3 have copies of keys and values
CHUNKS = [70, 1, 28, 1]  # a prompt, a decode, a chunk behind others, a decode


def model_on(world_size: int, switch: str) -> ModelConfig:
    """Two ranks have equal parts, three and four do not."""
    model = model_with(switch)
    return replace(model, n_kv_heads=6, vocab_size=132) if world_size == 2 else model


@cache
def exact(world_size: int, switch: str) -> torch.Tensor:
    model = model_on(world_size, switch)
    return plain_model.forward(model, plain_model.random_weights(model), TOKENS, 160)


def last_logits(parallel: Parallel, switch: str, backend: str) -> tuple[torch.Tensor, str]:
    """float32 [vocab] after TOKENS, and the type of the Transformer. Before the longest window, the block table names a block
    full of NaN."""
    runner = plain_model.load_runner(parallel, model_on(parallel.world_size, switch), backend=backend)
    used: Any = runner.backend
    for values in (used._cache.keys, used._cache.values):
        values[:, 11] = float("nan")
    start = 0
    admit = [SlotInit(3, TOKENS, list(range(10))[::-1], GREEDY)]
    for count in CHUNKS:
        if window := runner.model_config.longest_window:
            behind = max(0, start - window + 1) // runner.config.block_size
            runner._slots.block_tables[3, :behind] = 11
        runner.step(StepInput(0, 0, [Row(3, start, count, start + count == len(TOKENS))], admit=admit))
        admit, start = [], start + count
    return used.logits_of_samples([0])[0].clone(), type(used.model).__name__


@pytest.mark.parametrize(
    ("world_size", "backend"),
    [(1, "torch"), (2, "torch"), (3, "torch"), (2, "fused"), pytest.param(4, "torch", marks=pytest.mark.full)],
)
def test_logits_are_near_a_plain_forward_on_any_number_of_ranks(ranks: Any, world_size: int, backend: str) -> None:
    """Ranks with equal parts compute in fairscale's layers."""
    for switch in SWITCHES if world_size == 1 else COMBINED:
        if world_size == 1:
            got = [last_logits(alone("cpu"), switch, backend)]
        else:
            got = ranks(world_size).call(last_logits, switch, backend)
        expected = exact(world_size, switch)[-1]
        for logits, kind in got:
            error = (logits - expected).abs().max() / (expected.max() - expected.min())
            assert error < 1e-5, switch
            assert kind == ("FairscaleTransformer" if (world_size, backend) == (2, "torch") else "FusedTransformer")
