"""GGUF's Q8_0, Q4_0 and Q4_1 stay in memory what they are in the file."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Encoding

from llama_core.backends.parallel import Parallel, alone
from llama_core.backends.runner import ModelRunner
from llama_core.config import EngineConfig
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Row, SlotInit, StepInput
from tests.support.gguf_models import encode, random_tensors, write_model

FORMATS = {Encoding.Q8_0: "int8_groups", Encoding.Q4_0: "int4", Encoding.Q4_1: "int4_min"}
TOKENS = [1 + i * 37 % 90 for i in range(40)]


def load(parallel: Parallel, file: Path, dtype: str, **settings: Any) -> ModelRunner:
    config = EngineConfig(str(file), 96, 64, 2, device="cpu", dtype=dtype, **settings)  # type: ignore[arg-type]
    runner = ModelRunner.load(config, parallel)
    runner.allocate_cache(runner.max_num_blocks())
    return runner


def last_logits(parallel: Parallel, file: Path, dtype: str, **settings: Any) -> tuple[torch.Tensor, str]:
    """float32 [vocabulary] after TOKENS, and the report's dtype."""
    runner = load(parallel, file, dtype, **settings)
    admit = [SlotInit(0, TOKENS, list(range(4)), SamplingParams(temperature=0.0, logprobs=0))]
    runner.step(StepInput(0, 0, [Row(0, 0, len(TOKENS), True)], admit=admit))
    return runner.backend.logits_of_samples([0])[0].clone(), runner.report.dtype


def dequantized(encoding: Encoding) -> dict[str, Any]:
    """The model's tensors with the values that the encoded ones have."""
    tensors = random_tensors("llama")
    return {
        name: values
        if values.ndim == 1
        else gguf.quants.dequantize(encode(values, encoding), encoding).astype(np.float32)
        for name, values in tensors.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("encoding", FORMATS, ids=lambda encoding: encoding.name)
def test_stored_groups_have_the_bits_of_groups_packed_from_their_values(
    tmp_path: Path, encoding: Encoding, dtype: str
) -> None:
    stored = write_model(tmp_path / "stored", encoding=encoding)
    dense = write_model(tmp_path / "dense", more=dequantized(encoding))
    kept, description = last_logits(alone("cpu"), stored, dtype)
    assert FORMATS[encoding] in description
    packed, _ = last_logits(alone("cpu"), dense, dtype, quantization=FORMATS[encoding])
    assert torch.equal(kept, packed)
    expanded, description = last_logits(alone("cpu"), stored, dtype, quantization="none")
    assert FORMATS[encoding] not in description
    spread = (expanded.max() - expanded.min()).item()
    error = (kept - expanded).square().mean().sqrt().item()
    assert error < (3e-5 if dtype == "float32" else 0.06) * spread  # 0.025 in the mean of 12 random models


def test_each_matrix_keeps_its_own_encoding(tmp_path: Path) -> None:
    names = [name for name, values in random_tensors("llama").items() if values.ndim == 2]
    mixed = dict.fromkeys(names, Encoding.Q4_1) | {"output.weight": Encoding.Q8_0, "blk.0.attn_q.weight": Encoding.Q4_0}
    mixed["blk.1.ffn_down.weight"] = Encoding.F16
    file = write_model(tmp_path, encoding=mixed)
    logits, description = last_logits(alone("cpu"), file, "float32")
    assert "int4_min (7 matrices), int8_groups (output)" in description
    expanded, _ = last_logits(alone("cpu"), file, "float32", quantization="none")
    assert (logits - expanded).abs().max().item() < 1e-4 * (expanded.max() - expanded.min()).item()


def logits_on_ranks(parallel: Parallel, file: str, dtype: str) -> list[float]:
    values: list[float] = last_logits(parallel, Path(file), dtype)[0].tolist()
    return values


@pytest.mark.parametrize("encoding", FORMATS, ids=lambda encoding: encoding.name)
def test_two_ranks_keep_the_groups_of_one(ranks: Any, tmp_path: Path, encoding: Encoding) -> None:
    file = write_model(tmp_path, encoding=encoding)
    one = logits_on_ranks(alone("cpu"), str(file), "float32")
    two, _ = ranks(2).call(logits_on_ranks, str(file), "float32")
    assert one == pytest.approx(two, abs=1e-3)
