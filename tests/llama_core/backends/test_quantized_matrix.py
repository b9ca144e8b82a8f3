"""Quantized weights on the fused backend: the codes of llama.cpp and their values."""

import gguf
import pytest
import torch
import torch.nn.functional as F

from tests.support.forking import interpret
from tests.support.kernel_differences import FORMATS, GROUPED, matrix_of

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
from llama_core.backends.weight_formats.kernels import multiply
codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
expected = codes.view(torch.float8_e4m3fn).float()
is_number = ~expected.isnan()
assert is_number.sum() == 254
codes = torch.where(is_number, codes, 0)
for dtype in (torch.float32, torch.float16):  # the interpreter multiplies no bfloat16
    product = multiply(torch.eye(32, dtype=dtype), codes, torch.ones(8), None, is_packed=False).T.float()
    assert torch.equal(product[is_number], expected[is_number])
"""


def test_every_float8_has_its_value_in_the_kernel() -> None:
    interpret(EVERY_FP8)
