"""Weight formats: found and refused by name; the format of each matrix; the codes of llama.cpp and their values."""

from collections.abc import Mapping
from typing import Any

import gguf
import pytest
import torch
import torch.nn.functional as F

from deployments.args import ServerArgs
from llama_core.backends.parallel import alone
from llama_core.backends.weight_plan import WeightPlan
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.files.meta_params import config_from_params
from llama_core.files.source import DENSE
from tests.conftest import GOLDEN
from tests.llama_core.backends.fused.kernel_differences import FORMATS, GROUPED, matrix_of
from tests.support import checkpoints, on_ranks
from tests.support.forking import interpret
from tests.support.plans import plan_of

SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "multiple_of": 32, "norm_eps": 1e-5, "vocab_size": -1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.write(tmp_path_factory.mktemp("formats"), [checkpoints.random_weights(SHAPE)], SHAPE))


def test_an_unknown_quantization_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match="quantization must be one of auto, none, int8") as refused:
        EngineConfig("there", 640, 64, 2, quantization="int3")
    assert refused.value.param == "quantization"
    with pytest.raises(ValueError, match="quantization\n  Input should be 'auto', 'none', 'int8'"):
        ServerArgs(quantization="int3")


def test_an_fp8_cache_takes_a_byte_a_value_and_changes_logits_little(model: str) -> None:
    tokens = [1, *range(5, 40)]
    settings: dict[str, Any] = {"backend": "torch", "quantization": "none"}
    runners = [
        on_ranks.build(alone("cpu"), model, "float32", **settings, **cache).runner
        for cache in ({}, {"kv_cache_dtype": "fp8"})
    ]
    assert runners[0].backend.cache_block_bytes == 4 * runners[1].backend.cache_block_bytes
    plain, small = (
        torch.tensor(on_ranks.last_logits(alone("cpu"), model, tokens, [30, 5, 1], **settings, **cache))
        for cache in ({}, {"kv_cache_dtype": "fp8"})
    )
    assert 0 < (small - plain).std() < 0.2 * plain.std()
    parts = torch.tensor(on_ranks.last_logits(alone("cpu"), model, tokens, [36], **settings, kv_cache_dtype="fp8"))
    assert (parts - small).std() < 0.02 * plain.std(), "a chunk reads its own keys from the cache too"


@pytest.mark.parametrize(
    ("backend", "setting", "message"),
    [
        ("auto", "quantization", "needs a GPU, or the native backend, which cannot be used .*backend: torch has it"),
        ("native", "quantization", "the native backend cannot be used: .*no kernels for such weights"),
        ("auto", "kv_cache_dtype", "needs a GPU, or the native backend, which cannot be used .*backend: torch has it"),
        ("native", "kv_cache_dtype", "the native backend cannot be used: it has no cache in fp8"),
    ],
)
def test_fp8_is_refused_where_it_would_be_slow_unless_torch_is_asked_for(
    backend: str, setting: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        on_ranks.build(alone("cpu"), str(GOLDEN / "mp1"), "float32", backend=backend, **{setting: "fp8"})


# The format of every matrix, from how the checkpoint stores it and what the operator asks for.


# 6 heads of 16 dimensions: half of them are 48 inputs of wo, which is no multiple of 32. Half of the 256 hidden units is.
CONFIG = config_from_params(
    {"dim": 96, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "multiple_of": 256, "norm_eps": 1e-5}, vocab_size=640
)


def planned(
    stored: Mapping[str, str] | str,
    quantization: str = "auto",
    dtype: str = "bfloat16",
    world_size: int = 1,
    is_native: bool = False,
) -> WeightPlan:
    """`stored`: the format of each weight by the end of its name, or of all weights."""

    def stored_format(name: str) -> str:
        if isinstance(stored, str):
            return stored
        return next((found for end, found in stored.items() if name.endswith(end)), DENSE)

    return plan_of(CONFIG, stored_format, quantization, dtype, world_size, is_native=is_native)


def test_auto_keeps_each_matrix_as_it_is_stored() -> None:
    plan = planned({"output.weight": "int8_groups", "wq.weight": "int4", "wk.weight": "int4", "wv.weight": "int4"})
    assert plan.matrices["layers.1.qkv"] == "int4" and plan.matrices["layers.1.out"] == "bfloat16"
    assert plan.format_of("layers.0.attention.wk.weight") == "int4"
    assert plan.format_of("output.weight") == "int8_groups"
    assert plan.format_of("tok_embeddings.weight") == plan.format_of("layers.0.ffn_norm.weight") == "bfloat16"
    assert plan.format_of("layers.0.attention.wq.bias") == "bfloat16"
    assert plan.coding_of("layers.0.attention.wv.weight") == "int4" and not plan.coding_of(
        "layers.0.attention.wo.weight"
    )
    assert str(plan) == "bfloat16 with int4 (2 matrices), int8_groups (output)"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("int4", "int4", "int4_min"), "int4_min"),
        (("int4", "int4", "int8_groups"), "bfloat16"),
        (("int4_min", "int4_min", DENSE), "bfloat16"),
    ],
)
def test_parts_of_one_matrix_that_are_stored_differently_share_a_format(parts: tuple[str, ...], expected: str) -> None:
    plan = planned(dict(zip(("wq.weight", "wk.weight", "wv.weight"), parts, strict=True)))
    assert plan.matrices["layers.0.qkv"] == expected
    assert plan.coding_of("layers.0.attention.wq.weight") == (None if expected == "bfloat16" else "int4")


def test_an_encoding_that_no_format_holds_is_expanded_and_named() -> None:
    plan = planned({"output.weight": "Q6_K", "wq.weight": "int4", "wk.weight": "int4", "wv.weight": "Q6_K"})
    assert plan.is_plain and not plan.coding_of("layers.0.attention.wq.weight")
    assert str(plan) == "bfloat16 with 3 matrices expanded from Q6_K + int4, Q6_K"
    assert str(planned("Q4_K", "int4")) == "bfloat16 with int4 weights"


def test_a_matrix_whose_groups_the_ranks_cut_is_expanded() -> None:
    plan = planned("int4", world_size=2)
    assert plan.expanded == {"layers.0.out": "int4", "layers.1.out": "int4"}
    assert plan.matrices["layers.0.out"] == "bfloat16" and plan.matrices["layers.0.down"] == "int4"
    again = planned("int4", "int4", world_size=2)
    assert again.matrices["layers.0.out"] == "int4" and not again.coding_of("layers.0.attention.wo.weight")
    assert planned("int4").expanded == planned(DENSE, world_size=2).expanded == {}


def test_the_native_engine_holds_every_coding_and_what_has_none_in_8_bits() -> None:
    assert str(planned({"output.weight": "q6_k"}, is_native=True)) == "bfloat16 with q6_k (output)"
    plan = planned({"wq.weight": "q4_k", "wk.weight": "q4_k", "wv.weight": "q6_k", "w2.weight": "Q3_K"}, is_native=True)
    assert plan.matrices["layers.0.qkv"] == plan.matrices["layers.0.down"] == "int8_groups"
    assert plan.expanded["layers.0.qkv"] == "q4_k + q6_k" and plan.quantizes("layers.0.attention.wq.weight")
    assert planned("int4_128", world_size=2, is_native=True).matrices["layers.0.down"] == "int4_128"
    assert planned("int4_128", world_size=4, is_native=True).matrices["layers.0.down"] == "int4"
    assert (
        planned("int4_zero_128", world_size=4, is_native=True).coding_of("layers.0.feed_forward.w2.weight")
        == "int4_min"
    )
    assert planned("int4 with float32 scales", is_native=True).matrices["layers.0.down"] == "int4"
    assert planned("int4 with float32 scales").is_plain


# Quantized weights on the fused backend: the codes of llama.cpp and their values.


GGUF_TYPES = {
    "int8_groups": gguf.GGMLQuantizationType.Q8_0,
    "int4": gguf.GGMLQuantizationType.Q4_0,
    "int4_min": gguf.GGMLQuantizationType.Q4_1,
}
# What is lost at most, of the largest value of a group (or of an output).
LOSS = {"int8": 1 / 250, "fp8": 1 / 16, "int8_groups": 1 / 250, "int4": 1 / 7, "int4_min": 1 / 7}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_have_the_values_of_llama_cpp(name: str) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(3))
    weight[0, :32] = 0
    packed = gguf.quants.quantize(weight.numpy(), GGUF_TYPES[name])
    expected = torch.from_numpy(gguf.quants.dequantize(packed, GGUF_TYPES[name]))
    assert torch.equal(matrix_of(name, weight).dequantized(), expected)


@pytest.mark.parametrize("inputs", [32, 96, 75])
@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_near_that_of_the_dense_weights(name: str, inputs: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(10, inputs, generator=generator), torch.randn(4, inputs, generator=generator)
    matrix = matrix_of(name, weight)
    assert (matrix.dequantized() - weight).abs().max() <= LOSS[name] * weight.abs().max()
    torch.testing.assert_close(matrix.multiply(x), F.linear(x, matrix.dequantized()))
    assert matrix.held.nbytes < weight.nbytes / 2


EVERY_FP8 = """
import torch
from llama_core.backends.weight_formats.format import HeldWeights
from llama_core.backends.weight_formats.kernels import multiply
codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
expected = codes.view(torch.float8_e4m3fn).float()
is_number = ~expected.isnan()
assert is_number.sum() == 254
codes = torch.where(is_number, codes, 0)
for dtype in (torch.float32, torch.float16):  # the interpreter multiplies no bfloat16
    product = multiply(torch.eye(32, dtype=dtype), HeldWeights(codes, torch.ones(8))).T.float()
    assert torch.equal(product[is_number], expected[is_number])
"""


def test_every_float8_has_its_value_in_the_kernel() -> None:
    interpret(EVERY_FP8)
