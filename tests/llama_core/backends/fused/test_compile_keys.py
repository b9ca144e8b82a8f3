"""Random steps of the fused backend launch no variant of a kernel that its start has not compiled.

A compilation takes a second on every rank, while requests wait.

Triton's own function says which variant a launch takes. Models have real sizes, on torch's meta device.
"""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from llama_core.backends.backend import LOGITS_AT_A_TIME
from llama_core.backends.fused import backend as fused
from llama_core.backends.fused.backend import FusedBackend
from llama_core.backends.fused.buffers import DeviceSlots
from llama_core.backends.fused.device import StepDevice, Work
from llama_core.config import EngineConfig
from llama_core.model.config import ModelConfig
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit
from tests.llama_core.backends.fused.counted_memory import META, meta_backend, recorded_keys
from tests.support.plain_model import decoder

pytest.importorskip("triton")
STEPS = 60
LLAMA_3_8B = decoder(4096, 1, 32, 8, 128, 14336, 128256, norm_eps=1e-5)
SMALL = decoder(576, 1, 9, 3, 64, 1536, 49152, norm_eps=1e-5)
BIASED = decoder(
    4096,
    1,
    32,
    8,
    128,
    14336,
    128256,
    attention_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    qk_norm=True,
)
CASES: dict[str, tuple[ModelConfig, int, dict[str, Any]]] = {
    "bfloat16": (LLAMA_3_8B, 1, {}),
    "an odd number of samples": (LLAMA_3_8B, 1, {"max_batch_size": 33, "speculation": False}),
    "many sequences": (LLAMA_3_8B, 1, {"max_batch_size": 100}),
    "one sequence": (LLAMA_3_8B, 1, {"max_batch_size": 1}),
    "biases on 8 ranks": (BIASED, 8, {}),
    "9 heads, int8": (SMALL, 1, {"quantization": "int8"}),
    "int4, fp8 cache": (LLAMA_3_8B, 1, {"quantization": "int4", "kv_cache_dtype": "fp8"}),
    "int8_groups on 2 ranks, one sequence": (LLAMA_3_8B, 2, {"quantization": "int8_groups", "max_batch_size": 1}),
    "in a fixed order": (LLAMA_3_8B, 1, {"batch_invariant": True}),
    "in a fixed order, int4": (LLAMA_3_8B, 1, {"batch_invariant": True, "quantization": "int4"}),
}


class _Captures(StepDevice):
    """Runs works once before they are captured, and never afterwards, as a GPU's host does."""

    captures = True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        pass

    def capture(self, work: Work) -> Work:
        return lambda: None


def opened(name: str) -> tuple[FusedBackend, DeviceSlots, EngineConfig]:
    """Ready for steps, with every kernel compiled that the start compiles."""
    model, num_ranks, fields = CASES[name]
    found = meta_backend(model, num_ranks, _Captures(META), **{"max_batch_size": 40} | fields)
    with patch.object(fused, "smallest", lambda parallel, value: value):
        found[0].allocate_cache(50)
    return found


def random_rows(generator: np.random.Generator, config: EngineConfig) -> list[Row]:
    """Decodes, some with drafts, and prompts of any length, together no more than a step has."""
    left, drafts = config.max_step_tokens, config.max_drafts
    rows = []
    for slot in range(int(generator.integers(1, config.max_batch_size + 1))):
        kind = generator.integers(8)
        count = min(int(generator.integers(0, 6)), drafts) if kind == 0 else 0
        length = 1 + count if kind < 7 else int(generator.integers(1, 1900))
        if length > left - config.max_batch_size:
            length, count = 1, 0
        drafts -= count
        left -= length
        samples = bool(kind < 7 or generator.integers(2))
        rows.append(Row(slot, int(generator.integers(0, 900)), length, samples, count))
    return rows


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_no_step_launches_a_variant_that_the_start_has_not_compiled(name: str) -> None:
    generator = np.random.default_rng(len(name))
    with recorded_keys() as keys:
        backend, slots, config = opened(name)
        compiled = set(keys)
        for slot in range(config.max_batch_size):
            slots.admit(SlotInit(slot, [1, 2, 3], [0], SamplingParams(0.7, seed=1)))
        for _ in range(STEPS):
            rows = random_rows(generator, config)
            backend.start(rows, keep_logits=bool(generator.integers(2)))
            # Most steps have a graph, and their bodies launch nothing.
            assert keys <= compiled, ({key for key in keys if key not in compiled}, rows)
        for begin, end in ((0, LOGITS_AT_A_TIME), (5, 5 + LOGITS_AT_A_TIME // 2 + 1), (3, 4)):
            backend.logits_of_tokens(range(begin, min(end, config.max_step_tokens)))
        assert keys <= compiled, keys - compiled
    assert len(compiled) > 10
