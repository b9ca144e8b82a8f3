"""Products of few rows with SwiGLU and the residual in their epilogues, in Triton's interpreter, and when they are chosen.

The same checks run on a GPU over the shapes of models.
"""

from unittest.mock import patch

import pytest
import torch

from benchmarks.gpu.every_kernel import always
from llama_core.execution.fused.device import StepDevice
from llama_core.execution.fused.product_kernels import MOST_ROWS, never
from llama_core.execution.parallel import alone
from llama_core.model_config import ModelConfig
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Draft, Row, SlotInit, StepInput
from tests.support.examples import each_example, st
from tests.support.full_runs import with_full_ones
from tests.support.interpreter import interpret
from tests.support.plain_model import forward, load_runner, random_weights
from tests.support.product_checks import (
    FORMATS,
    ProductCase,
    check_bits,
    check_neighbours,
    check_values,
    random_case,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
ROWS = (1, 2, 15, 16, 17, 32, 33, 63, 64)
TOKENS = [1 + (7 * i) % 89 for i in range(80)]
MODEL = ModelConfig(48, 2, 4, 2, 16, 96, 90, attention_out_bias=True, mlp_bias=True)


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
    from llama_core.execution.fused.kernels import TritonOps

    assert TritonOps(batch_invariant=True, fuses=always)._fuses is never, "fused products are not batch-invariant"
    for number, name in enumerate((*FORMATS, "plain", "plain")):
        check_bits(ProductCase(name, torch.float16, (1, 40, 20)[number % 3], 17 + number, 1030, number != 1, number))
    check_neighbours(ProductCase("plain", torch.float16, 17, 33, 1100, False, 3))


def check_chosen_elsewhere() -> None:
    """On GPUs with less shared memory."""
    with patch("llama_core.execution.fused.product_kernels.has_much_shared_memory", lambda: False):
        check_chosen()


def check_steps(dtype: str = "float32", *, fuses_some: bool = True, fuses_none: bool = True) -> None:
    """A prompt of more rows than the products take, decodes and drafts, with the launches of each step."""
    from benchmarks.gpu.every_kernel import recorded_launches
    from llama_core.execution.fused.kernels import TritonOps

    expected = forward(MODEL, random_weights(MODEL), TOKENS, 160)
    cases = [(always, "_gated_product", "_product_of_rows")] * fuses_some + [(never, "_gated_silu", None)] * fuses_none
    for fuses, gated, added in cases:
        with patch(
            "llama_core.execution.rank_loading.choose_ops",
            lambda kind, device, fuses=fuses, **options: (TritonOps(fuses=fuses), StepDevice(device)),
        ):
            runner = load_runner(alone("cpu"), MODEL, device="cpu", backend="fused", dtype=dtype)
        params = SamplingParams(temperature=0.0, logprobs=0)
        slot = SlotInit(0, TOKENS, list(range(runner.config.blocks_per_sequence)), params)
        with recorded_launches() as names:
            runner.step(StepInput(0, 0, [Row(0, 0, MOST_ROWS + 5, True)], admit=[slot]))
        assert "_gated_silu" in names and not names & {"_gated_product", "_product_of_rows"}
        logits = runner.backend.logits_of_samples([0]).double()
        assert (logits - expected[MOST_ROWS + 4]).abs().max() < 5e-4
        with recorded_launches() as names:
            known = Draft(0, MOST_ROWS + 5, [TOKENS[MOST_ROWS + 5]])  # in the place of the sampled token
            runner.step(StepInput(0, 1, [Row(0, MOST_ROWS + 5, 1, True)], drafts=[known]))
        assert gated in names and (added in names if added else "_product_of_rows" not in names)
        assert ("_gated_silu" in names) == (fuses is never)
        logits = runner.backend.logits_of_samples([0]).double()
        assert (logits - expected[MOST_ROWS + 5]).abs().max() < 5e-4


def run_interpreted(statement: str) -> None:
    """Run a statement with this module's names where Triton interprets kernels."""
    interpret(f"import torch\nfrom {__name__} import *\n{statement}")


@pytest.mark.parametrize(
    "case",
    with_full_ones(
        ["float16, FORMATS, 2", "float16, FORMATS, 12", "float32, FORMATS[:3], 4"], in_each_run=["float16, FORMATS, 2"]
    ),
)
def test_random_products_in_the_interpreter_are_those_of_float64_and_of_the_kernels_that_they_replace(
    case: str,
) -> None:
    run_interpreted(f"check_random(torch.{case})")


@pytest.mark.parametrize("check", ["check_chosen()", "check_chosen_elsewhere()"])
def test_each_tile_and_split_in_the_interpreter_gives_the_bits_of_separate_kernels(check: str) -> None:
    run_interpreted(check)


@pytest.mark.parametrize("kind", with_full_ones(["fuses_none", "fuses_some"], in_each_run=["fuses_none"]))
def test_steps_in_the_interpreter_have_the_logits_of_float64_with_fewer_kernels(kind: str) -> None:
    run_interpreted(f"check_steps({kind}=False)")


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
