"""Every switch of ModelConfig on the torch and fused backends: logits near a plain forward in float64, on any ranks."""

from functools import cache
from typing import Any

import pytest
import torch

from llama_core.execution.parallel import Parallel, alone
from llama_core.execution.reference.backend import choose_attention
from llama_core.scheduling.step import Row, SlotInit, StepInput
from tests.llama_core.execution.test_switches import GREEDY, SWITCHES, TOKENS, model_with
from tests.support import plain_model

COMBINED = ("none", "all", "Qwen2", "Qwen3")  # more ranks than 3 have copies of keys and values
CHUNKS = [70, 1, 28, 1]  # a prompt, a decode, a chunk behind others, a decode


@cache
def exact(switch: str) -> torch.Tensor:
    model = model_with(switch)
    return plain_model.forward(model, plain_model.random_weights(model), TOKENS, 160)


def last_logits(parallel: Parallel, switch: str, backend: str) -> torch.Tensor:
    """float32 [vocab] after TOKENS. Blocks behind the longest window have the number of a block full of NaN."""
    model = model_with(switch)
    runner = plain_model.load_runner(parallel, model, backend=backend)
    cache: Any = runner.backend
    for values in (cache._cache.keys, cache._cache.values):
        values[:, 11] = float("nan")
    start = 0
    admit = [SlotInit(3, TOKENS, list(range(10))[::-1], GREEDY)]
    for count in CHUNKS:
        if model.longest_window:
            behind = max(0, start - model.longest_window + 1) // runner.config.block_size
            runner._slots.block_tables[3, :behind] = 11
        runner.step(StepInput(0, 0, [Row(3, start, count, start + count == len(TOKENS))], admit=admit))
        admit, start = [], start + count
    return runner.backend.logits_of_samples([0])[0].clone()


@pytest.mark.parametrize("backend", ["torch", "fused"])
@pytest.mark.parametrize("world_size", [1, 3, pytest.param(4, marks=pytest.mark.full)])
def test_logits_are_near_a_plain_forward_on_any_number_of_ranks(ranks: Any, world_size: int, backend: str) -> None:
    for switch in SWITCHES if world_size == 1 else COMBINED:
        if world_size == 1:
            got = [last_logits(alone("cpu"), switch, backend)]
        else:
            got = ranks(world_size).call(last_logits, switch, backend)
        expected = exact(switch)[-1]
        for logits in got:
            error = (logits - expected).abs().max() / (expected.max() - expected.min())
            assert error < 1e-5, switch


def test_cudnns_attention_is_off_on_a_gpu() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        choose_attention(torch.device("cpu"))
        assert torch.backends.cuda.cudnn_sdp_enabled()
        choose_attention(torch.device("cuda"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
