"""Products of few rows with SwiGLU and the residual in their epilogues, in Triton's interpreter, and when they are chosen.

The same checks run on a GPU over the shapes of models.
"""

from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu.every_kernel import always
from llama_core.backends.fused.product_kernels import never
from tests.support.examples import each_example, st
from tests.support.full_runs import with_full_ones
from tests.support.interpreter import interpret
from tests.support.product_checks import FORMATS, ProductCase, check_bits, check_neighbours, check_values, random_case

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
ROWS = (1, 2, 15, 16, 17, 32, 33, 63, 64)


def check_random(dtype: torch.dtype, formats: tuple[str, ...], examples: int) -> None:
    """Over random shapes of each format: any rows, odd sizes, inputs in one split and in several, with and without biases."""
    inputs = st.one_of(st.integers(1, 200), st.integers(1024, 1700))
    sizes = st.tuples(st.sampled_from(ROWS), st.integers(1, 70), inputs)

    @each_example(examples, st.tuples(st.sampled_from(formats), st.booleans(), st.integers(0, 10**6), sizes))
    def check(example: tuple[str, bool, int, tuple[int, int, int]]) -> None:
        name, has_bias, seed, size = example
        case = ProductCase(name, dtype, *size, has_bias, seed)
        check_values(case)
        check_bits(case)
        check_neighbours(case)

    check()


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
def test_random_products_in_the_interpreter_are_those_of_float64(case: str) -> None:
    run_interpreted(f"check_random(torch.{case})")


@pytest.mark.parametrize("check", ["check_chosen()", "check_chosen_elsewhere()"])
def test_each_tile_and_split_in_the_interpreter_gives_the_bits_of_separate_kernels(check: str) -> None:
    run_interpreted(check)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("seeds", [range(first, first + 5) for first in range(0, 60, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_on_a_gpu_are_those_of_float64_and_of_the_kernels_that_they_replace(
    dtype: torch.dtype, seeds: range
) -> None:
    for seed in seeds:
        case = random_case(seed, dtype, torch.device("cuda"))
        check_values(case)
        check_bits(case)
        check_neighbours(case)
