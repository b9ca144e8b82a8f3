"""The memory plan of the fused backend beside the bytes of all tensors that it makes, of real sizes on torch's meta device."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llama_core.backends.backend import LOGITS_AT_A_TIME
from llama_core.backends.fused import backend as fused
from llama_core.backends.fused.backend import FusedBackend
from llama_core.backends.fused.buffers import DeviceSlots
from llama_core.backends.fused.step_memory import max_split_decode_tokens, step_bytes
from llama_core.backends.fused.step_plan import CAPTURED_PROMPT_TOKENS, LARGEST_PADDING
from llama_core.backends.memory_budget import planned_weight_bytes
from llama_core.backends.parallel import Parallel
from llama_core.backends.sampling import logprobs_of
from llama_core.config import EngineConfig
from llama_core.model.config import ModelConfig
from llama_core.scheduling.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from llama_core.scheduling.step import Row, SlotInit
from tests.llama_core.backends.fused.counted_memory import (
    META,
    CountingDevice,
    LiveBytes,
    meta_backend,
    without_kernels,
)
from tests.support.hugging_face import read
from tests.support.plain_model import decoder
from tests.support.plans import plan_of

pytest.importorskip("triton")
TOLERANCE = 0.03
NUM_BLOCKS = 50

# Two layers of each: what a step takes at once does not depend on their number.
LLAMA_2_7B = decoder(4096, 2, 32, 32, 128, 11008, 32000, norm_eps=1e-5)
LLAMA_3_8B = replace(LLAMA_2_7B, n_kv_heads=8, hidden_dim=14336, vocab_size=128256)
EIGHT_B = (4096, 2, 32, 8, 128)
QWEN_3_8B = decoder(*EIGHT_B, 12288, 151936, qk_norm=True)
QWEN_2_7B = decoder(3584, 2, 28, 4, 128, 18944, 152064, norm_eps=1e-6, attention_bias=True)
BIASED = decoder(*EIGHT_B, 14336, 128256, attention_bias=True, attention_out_bias=True, mlp_bias=True)
WINDOWED = decoder(*EIGHT_B, 14336, 32000, windows=(4096, 4096))
EXAONE_4, GRANITE_3 = (
    read(
        {
            **{"model_type": family, "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32},
            **{
                "num_key_value_heads": 8,
                "intermediate_size": 12800,
                "vocab_size": 49155,
                "max_position_embeddings": 8192,
            },
            **({"residual_multiplier": 0.22, "embedding_multiplier": 12.0} if family == "granite" else {}),
        }
    )
    for family in ("exaone4", "granite")
)
SMALL = decoder(2048, 2, 32, 4, 64, 5632, 32000, norm_eps=1e-5)
CASES: dict[str, tuple[ModelConfig, int, dict[str, Any]]] = {
    "Llama 2 7B": (LLAMA_2_7B, 1, {}),
    "Llama 3 8B": (LLAMA_3_8B, 1, {"max_seq_len": 8192}),
    "EXAONE 4": (EXAONE_4, 1, {}),
    "EXAONE 4 on 2 ranks": (EXAONE_4, 2, {}),
    "Granite 3": (GRANITE_3, 1, {}),
    "Granite 3 on 2 ranks": (GRANITE_3, 2, {}),
    "Llama 3 8B with adapters": (LLAMA_3_8B, 1, {"max_loras": 8, "max_lora_rank": 64}),
    "Llama 3 8B on 2 ranks": (LLAMA_3_8B, 2, {"max_seq_len": 8192}),
    "Llama 2 7B in a fixed order on 4 ranks": (LLAMA_2_7B, 4, {"batch_invariant": True}),
    "Llama 2 7B on 3 ranks, which share unevenly": (LLAMA_2_7B, 3, {}),
    "Qwen 3 8B, norms of heads, fp8 cache": (QWEN_3_8B, 1, {"kv_cache_dtype": "fp8"}),
    "Qwen 2 7B, biases, many sequences": (QWEN_2_7B, 2, {"max_batch_size": 256}),
    "every bias, int8": (BIASED, 1, {"quantization": "int8"}),
    "fp8 weights and cache on 2 ranks": (LLAMA_3_8B, 2, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "int4": (LLAMA_2_7B, 1, {"quantization": "int4", "max_step_tokens": 8192}),
    "many sequences in a long context": (LLAMA_3_8B, 1, {"max_seq_len": 131072, "max_batch_size": 256}),
    "windows in a long context": (WINDOWED, 1, {"max_seq_len": 131072, "max_batch_size": 16}),
    "small, in steps that are all captured": (SMALL, 1, {"max_step_tokens": 256, "max_batch_size": 128}),
}


def run_without_graphs(backend: FusedBackend, slots: DeviceSlots, config: EngineConfig) -> None:
    """Decodes, checked drafts and the chunk of a prompt, as many tokens as a step without a graph can have. The most
    decodes whose splits' results are stored."""
    tokens = int(config.max_step_tokens / LARGEST_PADDING)
    if tokens <= CAPTURED_PROMPT_TOKENS[-1]:
        return
    split_decodes = max_split_decode_tokens(len(backend.model.share.kv_heads))
    last = min(config.max_batch_size - 1, max(1, split_decodes - config.max_drafts))
    for slot in range(last + 1):
        slots.admit(SlotInit(slot, [1, 2, 3], [0], SamplingParams(0.7, seed=1)))
    drafts = [config.max_drafts, *[0] * (last - 1)]
    rows = [Row(slot, 5, 1 + count, True, count) for slot, count in enumerate(drafts)]
    rows.append(Row(last, 0, tokens - sum(row.length for row in rows), True))
    backend.start(rows, keep_logits=True)


def prompt_logprobs(backend: FusedBackend) -> None:
    logits = backend.logits_of_tokens(range(LOGITS_AT_A_TIME))
    logprobs_of(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device), MAX_TOP_LOGPROBS)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_is_taken_within_three_percent(name: str) -> None:
    """Of one rank that loads, captures every graph, and runs the largest steps that have none. Weights, and what a step takes
    beside weights and cache, each for itself."""
    model, num_ranks, fields = CASES[name]
    live, parallel = LiveBytes(), Parallel(0, num_ranks, META)
    with (
        without_kernels(),
        patch.object(fused, "smallest", lambda parallel, value: value),
        torch.inference_mode(),
        live,
    ):
        device = CountingDevice(live)
        backend, slots, config = meta_backend(model, num_ranks, device, **fields)
        backend.allocate_cache(NUM_BLOCKS)
        kept = live.now - backend.weight_bytes
        run_without_graphs(backend, slots, config)
        eager = max(device.eager, device.peak_of(lambda: prompt_logprobs(backend)))
    taken = kept - NUM_BLOCKS * backend.cache_block_bytes + device.pool + eager
    assert backend.working_bytes == pytest.approx(taken, rel=TOLERANCE), (device.pool, eager)
    plan = plan_of(model, lambda name: "dense", config.quantization, "bfloat16", num_ranks)
    assert planned_weight_bytes(model, plan, parallel) == pytest.approx(backend.weight_bytes, rel=TOLERANCE)
    unallocated = device.pool + eager + backend.cache_block_bytes
    assert backend.unallocated_bytes(config.max_seq_len) == pytest.approx(unallocated, rel=TOLERANCE)
    # Before loading, without the arrays that grow with the context, which `memory_budget` counts.
    planned = step_bytes(config, model, parallel, torch.bfloat16)
    slot_bytes = (config.max_batch_size + 1) * 8 * (config.max_seq_len + config.blocks_per_sequence)
    arrays = slot_bytes + 4 * model.head_dim * config.max_seq_len
    assert planned + arrays == pytest.approx(backend.working_bytes, rel=0.01)
