"""Products of few rows with SwiGLU and the residual in their epilogues, in Triton's interpreter, and when they are chosen.

The same checks run on a GPU over the shapes of models. The interpreter truncates to bfloat16, so that type is for GPUs.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.gpu.every_kernel import always
from llama_core.backends.fused.product_kernels import never
from llama_core.backends.weight_formats.matrices import find_weight_format
from llama_core.model.weight_formats import QUANTIZED
from tests.support.forking import interpret
from tests.support.full_runs import with_full_ones

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
ROWS = (1, 2, 15, 16, 17, 32, 33, 63, 64)


FORMATS = ("plain", *QUANTIZED)
# Of a rounding to the type, of values near 1; results round up to five times.
CPU = torch.device("cpu")
STEPS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class ProductCase:
    """hidden: outputs of gate and of up, and of the addition."""

    format: str
    dtype: torch.dtype
    rows: int
    hidden: int
    inputs: int
    has_bias: bool
    seed: int
    device: torch.device = CPU

    @cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def values(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator).to(self.device)

    def bias(self, outputs: int) -> torch.Tensor | None:
        return self.values(outputs) if self.has_bias else None

    def matrix(self, outputs: int) -> Any:
        """Random weights."""
        name = str(self.dtype).removeprefix("torch.") if self.format == "plain" else self.format
        make = find_weight_format(name).torch_matrix
        matrix = make(outputs, self.inputs, self.dtype, self.device)
        matrix.set_rows(0, self.values(outputs, self.inputs) / self.inputs**0.5)
        return matrix

    def exact_matrix(self, outputs: int) -> tuple[Any, torch.Tensor]:
        """Small integers, with scales that are powers of two: sums are exact in any order. With their values as the kernel
        multiplies them, float64."""
        matrix = self.matrix(outputs)
        codes, scales, minima, is_packed = matrix.held
        if self.format in ("plain", "int8", "int8_groups"):
            codes.copy_(self.integers(-3, 3, *codes.shape))
        elif self.format == "fp8":
            small = self.integers(-3, 3, *codes.shape).float().to(torch.float8_e4m3fn)
            codes.copy_(small.view(torch.uint8))
        else:
            codes.copy_(self.integers(0, 255, *codes.shape))
        for each in (scales, minima):
            if each is not None:
                each.copy_(2.0 ** self.integers(-3, 0, *each.shape))
        assert is_packed == (self.format in ("int4", "int4_min"))
        dense = matrix.weight if self.format == "plain" else matrix.dequantized()
        # Values of groups are rounded before the product; one scale of an output is a factor of the sum.
        return matrix, (dense.to(self.dtype) if scales is not None and scales.ndim == 2 else dense).double()


def check_bits(case: ProductCase) -> None:
    """Equal to a product, rounded once, before the kernels that the epilogues replace, and the norm within its roundings;
    nothing beyond the rows is written."""
    from llama_core.backends.fused.kernels import TritonOps
    from llama_core.backends.fused.ops import RowNorm

    ops, separate, norm = TritonOps(fuses=always), TritonOps(), RowNorm(case.values(case.hidden), 1e-5)
    x = case.integers(-3, 3, case.rows, case.inputs).to(case.dtype)
    matrix, dense = case.exact_matrix(2 * case.hidden)
    bias = case.bias(2 * case.hidden)
    product = F.linear(x.double(), dense).to(case.dtype)
    assert torch.equal(ops.gated_product(x, matrix, bias), separate.gate(product, bias)), case
    name = "_MANY_OUTPUTS_WITH_NARROW_TILES" if matrix.held.scales is None else "_MANY_OUTPUTS"
    with patch(f"llama_core.backends.fused.product_kernels.{name}", 1):
        assert torch.equal(ops.product(x, matrix), product), case
    matrix, dense = case.exact_matrix(case.hidden)
    bias = case.bias(case.hidden)
    states = case.values(case.rows + 2, case.hidden)
    before, expected = states.clone(), states[: case.rows].clone()
    product = F.linear(x.double(), dense).to(case.dtype)
    normed = ops.add_product_norm(states[: case.rows], x, matrix, norm, bias)
    # The norm's kernel is another one where it adds splits, and may sum the squares in another order.
    expected_norm = separate.add_norm(expected, product, norm, bias)
    assert ((normed - expected_norm).abs() <= 2 * STEPS[case.dtype] * expected_norm.abs()).all(), case
    assert torch.equal(states[: case.rows], expected) and torch.equal(states[case.rows :], before[case.rows :]), case


def check_neighbours(case: ProductCase) -> None:
    """A row has the same bits beside other rows, which may hold anything."""
    from llama_core.backends.fused.kernels import TritonOps
    from llama_core.backends.fused.ops import RowNorm

    ops, norm = TritonOps(fuses=always), RowNorm(case.values(case.hidden), 1e-5)
    kept = case.seed % case.rows
    x, states = case.values(case.rows, case.inputs), case.values(case.rows, case.hidden)
    others, other_states = case.values(*x.shape) * 100, case.values(*states.shape)
    others[:kept] = float("nan")
    others[kept], other_states[kept] = x[kept], states[kept]
    up, down = case.matrix(2 * case.hidden), case.matrix(case.hidden)
    found = []
    for given, into in ((x, states), (others, other_states)):
        gated = ops.gated_product(given, up)
        found.append((gated[kept], ops.add_product_norm(into, given, down, norm)[kept], into[kept]))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other), case


def random_case(seed: int, dtype: torch.dtype, device: torch.device) -> ProductCase:
    """Shapes of models and their neighbours, for GPUs."""
    draw = np.random.default_rng(seed)
    hidden = int(draw.choice([576, 1376, 2048, 4096, 4100, 11008]))
    inputs = int(draw.choice([512, 576, 1376, 4096, 11008])) + int(draw.choice([0, 0, 3]))
    rows = int(draw.choice([1, 2, 15, 16, 17, 32, 33, 64]))
    return ProductCase(FORMATS[seed % len(FORMATS)], dtype, rows, hidden, inputs, bool(seed % 2), seed, device)


def check_random(dtype: torch.dtype, formats: tuple[str, ...], examples: int) -> None:
    """Over random shapes of each format: any rows, odd sizes, inputs in one split and in several, with and without biases."""
    for seed in range(examples):
        draw = np.random.default_rng(seed)
        inputs = int(draw.integers(*(((1, 201), (1024, 1701))[seed % 2])))
        size = int(draw.choice(ROWS)), int(draw.integers(1, 71)), inputs
        case = ProductCase(str(draw.choice(formats)), dtype, *size, bool(draw.integers(2)), seed)
        check_bits(case)
        check_neighbours(case)


def check_chosen() -> None:
    """Each format, and each number of rows of a tile, with splits and biases."""
    from llama_core.backends.fused.kernels import TritonOps

    assert TritonOps(batch_invariant=True, fuses=always)._fuses is never, "fused products are not batch-invariant"
    for number, name in enumerate((*FORMATS, "plain", "plain")):
        check_bits(ProductCase(name, torch.float16, (1, 40, 20)[number % 3], 17 + number, 1030, number != 1, number))
    check_neighbours(ProductCase("plain", torch.float16, 17, 33, 1100, False, 3))


def check_chosen_elsewhere() -> None:
    """On GPUs with less shared memory."""
    with patch("llama_core.backends.fused.product_kernels.has_much_shared_memory", lambda: False):
        check_chosen()


def run_interpreted(statement: str) -> None:
    """Run a statement with this module's names where Triton interprets kernels."""
    interpret(f"import torch\nfrom {__name__} import *\n{statement}")


@pytest.mark.parametrize(
    "case",
    with_full_ones(
        ["float16, FORMATS, 2", "float16, FORMATS, 12", "float32, FORMATS[:3], 4"], in_each_run=["float16, FORMATS, 2"]
    ),
)
def test_random_products_in_the_interpreter_are_those_of_separate_kernels(case: str) -> None:
    run_interpreted(f"check_random(torch.{case})")


@pytest.mark.parametrize("check", ["check_chosen()", "check_chosen_elsewhere()"])
def test_each_tile_and_split_in_the_interpreter_gives_the_bits_of_separate_kernels(check: str) -> None:
    run_interpreted(check)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("seeds", [range(first, first + 5) for first in range(0, 60, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_on_a_gpu_are_those_of_the_kernels_that_they_replace(dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        case = random_case(seed, dtype, torch.device("cuda"))
        check_bits(case)
        check_neighbours(case)
