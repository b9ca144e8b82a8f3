"""Attention of the fused backend over random steps (`attention_cases`), beside attention in float64: in torch, in Triton's
interpreter and on a GPU."""

import pytest
import torch

from llama_core.backends.fused.ops import TorchOps
from llama_core.backends.fused.step_memory import combines_in_kernel
from llama_core.scheduling.step import Row
from tests.llama_core.backends.fused.attention_cases import (
    COMPILED_WINDOWS,
    MANY_POSITIONS,
    SHAPES,
    WIDE_SHAPES,
    WINDOWS,
    Case,
    attended,
    check,
    check_step,
)
from tests.support.forking import interpret
from tests.support.full_runs import with_full_ones

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize("is_float8", [False, True], ids=["cache of the same type", "float8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_torch_computes_what_float64_does(dtype: torch.dtype, is_float8: bool) -> None:
    for seed in range(40):
        shape, window = SHAPES[seed % len(SHAPES)], (*WINDOWS, -1, -40)[seed % (len(WINDOWS) + 2)]
        attended(TorchOps(), Case(seed, shape, dtype, torch.device("cpu"), is_float8=is_float8), window)


INTERPRETED = """
import torch
from llama_core.backends.fused.kernels import TritonOps
from tests.llama_core.backends.fused.attention_cases import WIDE_SHAPES, check, check_random
from llama_core.scheduling.step import Row
{}
"""


# Heads of 128, 256 and 160 values, with few tokens: a decode over a border of splits, a draft, and a chunk of several tiles.
WIDE = (
    "check(*to, torch.float16, {}, shapes=WIDE_SHAPES,"
    " rows=[Row(0, 129, 1, True), Row(1, 40, 2, True, 1), Row(2, 3, 34, False)])"
)


IN_EACH_RUN = [
    "check(*to, torch.float32, range(5))",
    "check(*to, torch.float16, [13], is_float8=True)",
    "check_random(*to, torch.float16, 3)",
    WIDE.format("[0, 1, 3]"),
]
FURTHER = [
    WIDE.format("range(9)"),
    "check(*to, torch.float32, range(6), shapes=WIDE_SHAPES)",
    "check(*to, torch.float16, range(4, 12))",
    "check_random(*to, torch.float32, 40)",
    "check_random(*to, torch.float16, 40)",
]


@pytest.mark.parametrize("call", with_full_ones([*IN_EACH_RUN, *FURTHER], IN_EACH_RUN))
def test_the_kernel_computes_what_float64_does_in_tritons_interpreter(call: str) -> None:
    interpret(INTERPRETED.format(f"to = TritonOps(), torch.device('cpu')\n{call}"))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE_SHAPES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_computes_what_float64_does_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Of many positions too, so that splits and buffers of all of a program's loop are used."""
    from llama_core.backends.fused.kernels import TritonOps

    to = TritonOps(), torch.device("cuda"), dtype
    for is_float8 in (False, True):
        check(*to, range(12), shapes=[shape], windows=COMPILED_WINDOWS, is_float8=is_float8)
        check(*to, range(4), shapes=[shape], windows=COMPILED_WINDOWS, is_float8=is_float8, rows=MANY_POSITIONS)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_decode_has_the_same_bits_alone_as_in_a_large_batch_on_a_gpu(dtype: torch.dtype) -> None:
    """In the batch one program computes all splits of a decode and combines them; alone several programs share them."""
    from llama_core.backends.fused.kernels import TritonOps

    rows, to = [Row(slot, 61 * slot % 700, 1, True) for slot in range(80)], (torch.device("cuda"), dtype)
    assert combines_in_kernel(len(rows), 8) and not combines_in_kernel(1, 8)
    check(TritonOps(), *to, range(2), shapes=[(32, 8, 128, 16)], windows=COMPILED_WINDOWS, rows=rows)
    check_step(TritonOps(batch_invariant=True), Case(0, (32, 8, 128, 16), dtype, to[0], rows=rows), 0)


BORDERS = """
import torch
from llama_core.backends.fused import step_memory as splits
splits.SPLIT_UNIT = 32
from llama_core.backends.fused import attention_launches as launches
from llama_core.backends.fused.kernels import TritonOps
from llama_core.scheduling.step import Row
from tests.llama_core.backends.fused.attention_cases import Case, check_step

torch.use_deterministic_algorithms(True)  # fills the results of splits with NaN first
rows = [Row(0, 63, 9, True, 8), Row(1, 63, 9, False), Row(2, 48, 20, False), Row(3, 255, 1, True), Row(4, 0, 1, True)]
for batch_invariant in (False, True):
    for window in (0, 33, -33):
        for launches.PROGRAMS_PER_MULTIPROCESSOR in (1, 4, 44):
            case = Case(0, (1, 1, 16, 8), torch.float32, torch.device("cpu"), rows=rows)
            check_step(TritonOps(batch_invariant=batch_invariant), case, window)
"""


def test_queries_of_a_tile_see_other_splits_than_each_other_in_tritons_interpreter() -> None:
    """Windows of 33 positions: the first query sees splits 0 and 1, the next splits 1 and 2, whose results lie where those of 0
    did. Shares of programs end at borders of splits and beside them, and a chunk's tile of queries at one of positions."""
    interpret(BORDERS)


COMBINED = """
import torch
from llama_core.backends.fused import step_memory as splits
splits.SPLIT_UNIT, splits.SPLIT_BITS = 32, 1
from llama_core.backends.fused import attention_launches as launches
from llama_core.backends.fused.kernels import TritonOps
from llama_core.scheduling.step import Row
from tests.llama_core.backends.fused.attention_cases import Case, check_step

torch.use_deterministic_algorithms(True)  # fills memory with NaN first
rows = [Row(0, 63, 9, True, 8), Row(1, 300, 1, True), Row(2, 0, 1, True), Row(3, 31, 2, True, 1), Row(4, 20, 5, False)]
combine, separate = launches.combine_splits, []

def counted(*args):
    separate.append(1)
    combine(*args)

launches.combine_splits = counted
for dtype, window, is_float8, batch_invariant in {}:
    case = Case(0, (4, 2, 16, 8), dtype, torch.device("cpu"), is_float8=is_float8, rows=rows)
    ops = TritonOps(batch_invariant=batch_invariant)
    launches.combines_in_kernel = splits.combines_in_kernel
    expected = case.attend(ops, rows, case.q, window)
    assert separate
    separate.clear()
    launches.combines_in_kernel = lambda num_decode_tokens, n_kv_heads: True
    assert torch.equal(case.attend(ops, rows, case.q, window), expected), (dtype, window, is_float8, batch_invariant)
    check_step(ops, case, window)
    assert not separate
"""


def test_splits_that_one_program_combines_have_the_same_bits() -> None:
    f32, f16 = "torch.float32", "torch.float16"
    cases = [(f32, 0, False, False), (f16, 33, False, False), (f16, 0, True, False), (f32, 40, False, True)]
    interpret(
        COMBINED.format("(" + ", ".join(f"({dtype}, {', '.join(map(str, rest))})" for dtype, *rest in cases) + ")")
    )
