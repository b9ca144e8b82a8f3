"""Attention of the fused backend over random steps (`attention_cases`), beside attention in float64: in torch, in Triton's
interpreter and on a GPU."""

import itertools

import numpy as np
import pytest
import torch

from llama_core.execution.fused.ops import TorchOps
from llama_core.execution.fused.step_memory import (
    SPLIT_UNIT,
    combines_in_kernel,
    max_split_decode_tokens,
    split_begin,
    split_count,
    split_of,
)
from llama_core.execution.fused.step_plan import TileSizes, plan_of
from llama_core.scheduling.step import Row
from tests.support.attention_cases import (
    COMPILED_WINDOWS,
    LIMITS,
    MANY_POSITIONS,
    SHAPES,
    SPARE_SLOT,
    WIDE_SHAPES,
    WINDOWS,
    Case,
    check,
    check_step,
    planned,
    random_rows,
)
from tests.support.full_runs import with_full_ones
from tests.support.interpreter import interpret

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize("is_float8", [False, True], ids=["cache of the same type", "float8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_torch_computes_what_float64_does(dtype: torch.dtype, is_float8: bool) -> None:
    for seed in range(40):
        shape, window = SHAPES[seed % len(SHAPES)], WINDOWS[seed % len(WINDOWS)]
        case = Case(seed, shape, dtype, torch.device("cpu"), is_float8=is_float8)
        expected = case.expected(window)
        if window:
            case.forget_before_windows(window)
        got = case.attend(TorchOps(), case.rows, case.q, window)
        assert (got.double() - expected).abs().max().item() <= LIMITS[dtype], (seed, case.rows)


INTERPRETED = """
import torch
from llama_core.execution.fused.kernels import TritonOps
from tests.support.attention_cases import WIDE_SHAPES, check, check_random
from llama_core.scheduling.step import Row
{}
"""


# Heads of 128, 256 and 160 values, with few tokens: a decode over a border of splits, a draft, and a chunk of several tiles.
WIDE = (
    "check(*to, torch.float16, {}, shapes=WIDE_SHAPES,"
    " rows=[Row(0, 129, 1, True), Row(1, 40, 2, True, 1), Row(2, 3, 34, False)])"
)


@pytest.mark.parametrize(
    "call",
    with_full_ones(
        [
            "check(*to, torch.float32, range(5))",
            "check(*to, torch.float16, [13], is_float8=True)",
            "check_random(*to, torch.float16, 3)",
            WIDE.format("[0, 1, 3]"),
            WIDE.format("range(9)"),
            "check(*to, torch.float32, range(6), shapes=WIDE_SHAPES)",
            "check(*to, torch.float16, range(4, 12))",
            "check_random(*to, torch.float32, 40)",
            "check_random(*to, torch.float16, 40)",
        ],
        in_each_run=[
            "check(*to, torch.float32, range(5))",
            "check(*to, torch.float16, [13], is_float8=True)",
            "check_random(*to, torch.float16, 3)",
            WIDE.format("[0, 1, 3]"),
        ],
    ),
)
def test_the_kernel_computes_what_float64_does_in_tritons_interpreter(call: str) -> None:
    interpret(INTERPRETED.format(f"to = TritonOps(), torch.device('cpu')\n{call}"))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE_SHAPES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_computes_what_float64_does_on_a_gpu(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    """Of many positions too, so that splits and buffers of all of a program's loop are used."""
    from llama_core.execution.fused.kernels import TritonOps

    to = TritonOps(), torch.device("cuda"), dtype
    for is_float8 in (False, True):
        check(*to, range(12), shapes=[shape], windows=COMPILED_WINDOWS, is_float8=is_float8)
        check(*to, range(4), shapes=[shape], windows=COMPILED_WINDOWS, is_float8=is_float8, rows=MANY_POSITIONS)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_decode_has_the_same_bits_alone_as_in_a_large_batch_on_a_gpu(dtype: torch.dtype) -> None:
    """In the batch one program computes all splits of a decode and combines them; alone several programs share them."""
    from llama_core.execution.fused.kernels import TritonOps

    rows, to = [Row(slot, 61 * slot % 700, 1, True) for slot in range(80)], (torch.device("cuda"), dtype)
    assert combines_in_kernel(len(rows), 8) and not combines_in_kernel(1, 8)
    check(TritonOps(), *to, range(2), shapes=[(32, 8, 128, 16)], windows=COMPILED_WINDOWS, rows=rows)
    check_step(TritonOps(batch_invariant=True), Case(0, (32, 8, 128, 16), dtype, to[0], rows=rows), 0)


GROWING = """
import torch
from llama_core.execution.fused import step_memory as splits
splits.SPLIT_UNIT, splits.SPLIT_BITS, start = {}
from llama_core.execution.fused.kernels import TritonOps
from llama_core.scheduling.step import Row
from tests.support.attention_cases import Case, check_step

for seed, window, batch_invariant in ((0, 0, False), (2, 129, False), (6, 40, True)):
    rows = [Row(1, start, 3, True, 2), Row(0, start + 70, 1, True)]
    case = Case(seed, (2, 1, 16, 8), torch.float32, torch.device("cpu"), rows=rows)
    check_step(TritonOps(batch_invariant=batch_invariant), case, window)
"""


@pytest.mark.parametrize("sizes", with_full_ones(["64, 1, 700", "128, 5, 8190"], in_each_run=["64, 1, 700"]))
def test_splits_grow_with_the_position_in_tritons_interpreter(sizes: str) -> None:
    """With short splits, so that a context which the interpreter reads in seconds has splits of three sizes."""
    interpret(GROWING.format(sizes))


BORDERS = """
import torch
from llama_core.execution.fused import step_memory as splits
splits.SPLIT_UNIT = 32
from llama_core.execution.fused import attention_launches as launches
from llama_core.execution.fused.kernels import TritonOps
from llama_core.scheduling.step import Row
from tests.support.attention_cases import Case, check_step

torch.use_deterministic_algorithms(True)  # fills the results of splits with NaN first
rows = [Row(0, 63, 9, True, 8), Row(1, 63, 9, False), Row(2, 48, 20, False), Row(3, 255, 1, True), Row(4, 0, 1, True)]
for batch_invariant in (False, True):
    for window in (0, 33):
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
from llama_core.execution.fused import step_memory as splits
splits.SPLIT_UNIT, splits.SPLIT_BITS = 32, 1
from llama_core.execution.fused import attention_launches as launches
from llama_core.execution.fused.kernels import TritonOps
from llama_core.scheduling.step import Row
from tests.support.attention_cases import Case, check_step

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


def test_a_program_that_computes_all_splits_of_a_decode_combines_them_to_the_same_bits() -> None:
    f32, f16 = "torch.float32", "torch.float16"
    cases = [(f32, 0, False, False), (f16, 33, False, False), (f16, 0, True, False), (f32, 40, False, True)]
    interpret(
        COMBINED.format("(" + ", ".join(f"({dtype}, {', '.join(map(str, rest))})" for dtype, *rest in cases) + ")")
    )


def test_large_batches_combine_splits_in_the_attention_kernel() -> None:
    assert [count for count in (16, 17) if combines_in_kernel(count, 32)] == [17] and max_split_decode_tokens(32) == 16
    assert [count for count in (65, 66) if combines_in_kernel(count, 8)] == [66] and max_split_decode_tokens(8) == 65


def test_a_plan_has_each_token_in_one_tile() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        rows = random_rows(generator, 6)
        if generator.random() < 0.3:
            rows = [Row(row.slot, row.start, 1, True) for row in rows]
        sizes = TileSizes(int(generator.integers(1, 17)), int(generator.integers(1, 65)))
        padding = int(generator.integers(3))
        plan, shape = planned(rows, sizes, padding), plan_of(rows, sizes).shape
        owners: dict[int, tuple[int, int]] = {}
        for tiles, size in ((plan.decodes, sizes.decode), (plan.chunks, sizes.chunk)):
            before = 0
            for begin, count, slot, start, tokens_before in tiles[tiles[:, 1] > 0].tolist():
                assert count <= size and tokens_before == before
                before += count
                owners |= {begin + i: (slot, start + i) for i in range(count)}
        expected = [(row.slot, row.start + i) for row in rows for i in range(row.length)]
        assert owners == dict(enumerate(expected))
        assert plan.tokens.T.tolist() == [*map(list, expected), *[[SPARE_SLOT, 0]] * padding]
        assert shape.decode_tokens == sum(
            row.length for row in rows if row.samples and row.length == 1 + row.num_drafts
        )
        samples = [
            (sum(other.length for other in rows[: i + 1]) - back, row.slot, row.start + row.length + 1 - back)
            for i, row in enumerate(rows)
            if row.samples
            for back in range(row.num_drafts + 1, 0, -1)
        ]
        assert plan.samples.T.tolist() == [*map(list, samples), *[[0, SPARE_SLOT, 0]] * padding]


def test_splits_are_short_at_first_and_few_at_last() -> None:
    begins = [split_begin(split) for split in range(225)]
    sizes = [after - begin for begin, after in itertools.pairwise(begins)]
    assert (
        sizes[:64] == [SPLIT_UNIT] * 64
        and sizes[64:] == [256] * 32 + [512] * 32 + [1024] * 32 + [2048] * 32 + [4096] * 32
    )
    for split, begin in enumerate(begins[1:], 1):
        assert (split_of(begin - 1), split_of(begin)) == (split - 1, split)
    # Llama 3.1 8B at batch 1: a program for each split and each of 8 key heads.
    assert [split_count(length, 0) for length in (512, 1024, 4096, 8192, 131_072)] == [4, 8, 32, 64, 192]
    # 129 positions lie in two splits of 128, and 130 in three, if one of them is the last of the first split.
    assert [split_count(4096, window) for window in (1, 129, 130)] == [1, 2, 3]


def test_a_window_has_no_more_splits_than_are_counted() -> None:
    """Their results lie one behind the other, by the split's number modulo their count."""
    for window in (1, 2, 127, 128, 129, 4096, 9000, 40_000):
        for length in (1, 128, 4097, 8200, 16_500, 70_000):
            most = max(
                split_of(last) - split_of(max(0, last + 1 - window)) + 1 for last in range(max(0, length - 300), length)
            )
            assert most <= split_count(length, window) <= split_count(length, 0), (window, length)
