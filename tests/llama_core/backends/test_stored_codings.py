"""GGUF's encodings beside the gguf package's own reading, and models of each in the native engine."""

import logging
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Encoding

from llama_core.backends.parallel import alone
from llama_core.files.gguf.types import ENCODINGS
from llama_core.model.weight_formats import CODINGS
from llama_core.weights.gguf import decode
from llama_core.weights.gguf_blocks import STORED, groups
from llama_core.weights.loader import dense
from tests.llama_core.backends.test_stored_groups import last_logits, logits_on_ranks
from tests.support.full_runs import with_full_ones
from tests.support.gguf_models import encode, write_model

BY_NAME = {encoding.name: encoding for encoding in ENCODINGS.values()}


@pytest.mark.parametrize("name", [name for name, encoding in BY_NAME.items() if encoding.values > 1])
def test_values_are_those_of_the_gguf_package(name: str) -> None:
    values = np.random.default_rng(0).normal(size=(16, 1536)).astype(np.float32)
    blocks = encode(values, Encoding[name])
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, Encoding[name]))
    stored = torch.from_numpy(blocks)
    assert torch.equal(decode(BY_NAME[name], stored), expected)
    if name in STORED:
        weight, coding = groups(name, BY_NAME[name].num_bytes, stored), CODINGS[STORED[name].coding]
        assert weight.scales.shape == (16, 1536 // coding.group) and (weight.minima is not None) == coding.has_minima
        assert torch.equal(dense(weight, coding), expected)


IN_EACH_RUN = ["Q4_K", "Q6_K", "IQ4_XS"]
ALL = [name for name in STORED if name not in ("Q8_0", "Q4_0", "Q4_1")]  # test_stored_groups.py has these


@pytest.mark.parametrize("name", with_full_ones(ALL, in_each_run=IN_EACH_RUN))
def test_a_model_is_held_as_stored_and_answers_as_its_values_do(ranks: Any, tmp_path: Path, name: str) -> None:
    file = write_model(tmp_path, encoding=Encoding[name])
    held, description = last_logits(alone("cpu"), file, "bfloat16", backend="native")
    assert description == f"bfloat16 with {STORED[name].coding} weights"
    values, _ = last_logits(alone("cpu"), file, "bfloat16", backend="native", quantization="none")
    exact, _ = last_logits(alone("cpu"), file, "float32", backend="torch")
    spread = (exact.max() - exact.min()).item()
    assert (
        held - exact
    ).square().mean().sqrt().item() < 0.06 * spread  # as much as bfloat16 alone in some random models
    assert (values - exact).square().mean().sqrt().item() < 0.06 * spread
    two, again = ranks(2).call(logits_on_ranks, str(file), "bfloat16")
    assert two == again
    assert (torch.tensor(two) - exact).square().mean().sqrt().item() < 0.06 * spread


def test_parts_of_unlike_codings_and_codings_without_kernels_are_held_in_8_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encodings = {f"blk.{i}.{name}.weight": Encoding.Q4_K for i in (0, 1) for name in ("attn_q", "attn_k", "ffn_gate")}
    encodings |= {"blk.0.attn_v.weight": Encoding.Q6_K, "blk.1.attn_v.weight": Encoding.Q4_K}
    encodings |= {f"blk.{i}.{name}.weight": Encoding.Q3_K for i in (0, 1) for name in ("ffn_up", "ffn_down")}
    file = write_model(tmp_path, encoding=encodings)
    with caplog.at_level(logging.WARNING, "llama_core.backends.backend_choice"):
        held, description = last_logits(alone("cpu"), file, "bfloat16", backend="native")
    assert [record.message for record in caplog.records] == [
        "1 matrices that are stored as q4_k + q6_k are held in int8_groups: layers.0.qkv",
        "2 matrices that are stored as Q3_K + q4_k are held in int8_groups: layers.0.gate_up, layers.1.gate_up",
        "2 matrices that are stored as Q3_K are held in int8_groups: layers.0.down, layers.1.down",
    ]
    assert "q4_k (layers.1.qkv)" in description
    exact, _ = last_logits(alone("cpu"), file, "float32", backend="torch")
    assert (held - exact).square().mean().sqrt().item() < 0.06 * (exact.max() - exact.min()).item()
