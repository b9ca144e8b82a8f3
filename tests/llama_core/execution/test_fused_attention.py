"""Attention of the fused backend over random steps, beside attention in float64, in torch and in Triton's interpreter.

The cache holds NaN wherever no token of the step's sequences lies, so that a result that reads further is NaN.
"""

import itertools
from collections.abc import Sequence as Seq
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.gpu.varlen import varlen_attention
from llama_core.execution.fused.ops import Ops, TorchOps
from llama_core.execution.fused.step_plan import (
    TILE_COLUMNS,
    AttentionTiles,
    StepArrays,
    TileSizes,
    plan_of,
)
from llama_core.execution.kv_cache import FLOAT8_BYTES, cached_as
from llama_core.scheduling.step import Row
from llama_core.step_time.attention_splits import SPLIT_UNIT, longest_split, split_begin, split_count, split_of
from tests.support.full_runs import with_full_ones
from tests.support.interpreter import interpret
from tests.support.kernel_compiler import TARGETS

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
# (query heads, key heads, head_dim, tokens of a block)
SHAPES = ((4, 4, 16, 16), (6, 2, 24, 4), (8, 1, 64, 32), (7, 1, 16, 8))
WIDE_SHAPES = ((4, 1, 128, 16), (2, 1, 256, 16), (3, 1, 96, 16), (2, 1, 160, 16), (1, 1, 192, 16))
LENGTHS = (1, 2, 5, 17, 70)
STARTS = (0, 1, 15, 127, 128, 150, 300)
WINDOWS = (0, 1, 40, 129, 1000)
COMPILED_WINDOWS = (0, 129)  # a GPU compiles a kernel for each; the interpreter has them all
SPARE_SLOT = 77
MANY_POSITIONS = (
    Row(0, 3000, 1, True),
    Row(1, 2000, 5, True, 4),
    Row(2, 1500, 700, False),
    Row(3, 0, 300, True),
    Row(4, 527, 1, True),
    Row(5, 63, 1, True),
)
FLOAT8_NAN = 0x7F
# A GPU's ex2.approx is wrong by 2^-22 of its result, NumPy's exp2 by 2^-24.
FLOAT32_LIMIT = 5e-6 if torch.cuda.is_available() else 2e-6
LIMITS = {torch.float32: FLOAT32_LIMIT, torch.float16: 4e-3, torch.bfloat16: 0.04}


def random_rows(generator: np.random.Generator, count: int) -> list[Row]:
    """Decodes, decodes with drafts, chunks that end their prompt and chunks that do not."""
    rows = []
    for slot in generator.permutation(count).tolist():
        start = int(generator.choice(STARTS))
        num_drafts = int(generator.choice([-1, 0, 1, 8]))
        if num_drafts < 0:
            rows.append(Row(slot, start, int(generator.choice(LENGTHS)), bool(generator.integers(2))))
        else:
            rows.append(Row(slot, start, 1 + num_drafts, True, num_drafts))
    return rows


def planned(rows: Seq[Row], sizes: TileSizes, padding: int = 0) -> StepArrays:
    """The plan of a step, over numbers that no plan has."""
    plan = plan_of(rows, sizes)
    tokens, decode_tokens, chunk_tiles = plan.shape
    shapes = (3, len(plan.sampled_slots)), (2, tokens), (decode_tokens, TILE_COLUMNS), (chunk_tiles, TILE_COLUMNS)
    arrays = StepArrays(
        *(np.full((height, width + padding), -9) for height, width in shapes[:2]),
        *(np.full((height + padding, width), -9) for height, width in shapes[2:]),
    )
    plan.write(arrays, SPARE_SLOT)
    return arrays


class Case:
    """One layer's cache and the queries of the rows of a step."""

    def __init__(
        self,
        seed: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_float8: bool = False,
        rows: Seq[Row] | None = None,
    ) -> None:
        """is_float8: of the cache. rows: random ones if absent."""
        self.name = f"seed {seed}, {shape}"
        generator = np.random.default_rng(seed)
        self.n_heads, self.n_kv_heads, self.head_dim, self.block_size = shape
        self.rows = list(rows) if rows else random_rows(generator, 4)
        self.device, self.dtype = device, dtype
        per_slot = -(-max(400, *(row.start + row.length for row in self.rows)) // self.block_size)
        order = torch.from_numpy(generator.permutation(len(self.rows) * per_slot))
        self.tables = order.view(len(self.rows), per_slot).to(device)
        torch.manual_seed(seed)
        cache_shape = (order.numel(), self.block_size, self.n_kv_heads, self.head_dim)
        self.keys, self.values = (torch.full(cache_shape, float("nan"), dtype=dtype, device=device) for _ in range(2))
        for row in self.rows:
            place = self.places(row, 0)
            for cache in (self.keys, self.values):
                cache.flatten(0, 1)[place] = torch.randn(len(place), *cache_shape[2:]).to(device, dtype)
        if is_float8:
            self.keys, self.values = (cached_as(FLOAT8_BYTES, cache) for cache in (self.keys, self.values))
        # A view with a stride, as the backend's queries are.
        qkv = torch.randn(sum(row.length for row in self.rows), self.n_heads + 2, self.head_dim)
        self.q = qkv.to(device, dtype)[:, : self.n_heads]

    def places(self, row: Row, first: int) -> torch.Tensor:
        position = torch.arange(first, row.start + row.length, device=self.device)
        return self.tables[row.slot, position // self.block_size] * self.block_size + position % self.block_size

    def attend(self, ops: Ops, rows: Seq[Row], q: torch.Tensor, window: int) -> torch.Tensor:
        sizes = ops.tile_sizes(self.n_heads, self.n_kv_heads, self.head_dim, self.dtype)
        arrays = planned(rows, sizes)
        tiles = AttentionTiles(*(torch.from_numpy(part).to(self.device) for part in (arrays.decodes, arrays.chunks)))
        return ops.attend(q, self.keys, self.values, self.tables, tiles, window)

    def expected(self, window: int) -> torch.Tensor:
        """In float64, token by token."""
        parts, group, token = [], self.n_heads // self.n_kv_heads, 0
        for row in self.rows:
            keys, values = (
                as_numbers(cache).flatten(0, 1)[self.places(row, 0)].double().repeat_interleave(group, dim=1)
                for cache in (self.keys, self.values)
            )
            for position in range(row.start, row.start + row.length):
                seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
                scores = torch.einsum("hd,lhd->hl", self.q[token].double(), keys[seen]) * self.head_dim**-0.5
                parts.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values[seen]))
                token += 1
        return torch.stack(parts)

    def forget_before_windows(self, window: int) -> None:
        """Blocks behind every window of a sequence may belong to others."""
        for row in self.rows:
            stale = self.places(row, 0)[: max(0, (row.start + 1 - window) // self.block_size * self.block_size)]
            for cache in (self.keys, self.values):
                cache.flatten(0, 1)[stale] = FLOAT8_NAN if cache.dtype == FLOAT8_BYTES else float("nan")


def as_numbers(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.float8_e4m3fn).float() if cache.dtype == FLOAT8_BYTES else cache


def check(
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    seeds: Seq[int],
    *,
    shapes: Seq[tuple[int, int, int, int]] = SHAPES,
    windows: Seq[int] = WINDOWS,
    is_float8: bool = False,
    rows: Seq[Row] | None = None,
) -> None:
    for seed in seeds:
        shape, window = shapes[seed % len(shapes)], windows[seed % len(windows)]
        check_step(ops, Case(seed, shape, dtype, device, is_float8=is_float8, rows=rows), window)


def check_step(ops: Ops, case: Case, window: int) -> None:
    """All rows together are near float64, and each alone has the same bits."""
    expected = case.expected(window)
    if window:
        case.forget_before_windows(window)
    got = case.attend(ops, case.rows, case.q, window)
    difference = (got.double() - expected).abs().max().item()
    assert difference <= LIMITS[case.dtype], (case.name, window, case.rows, difference)
    begin = 0
    for row in case.rows:
        end = begin + row.length
        alone = case.attend(ops, [row], case.q[begin:end], window)
        assert torch.equal(alone, got[begin:end]), ("beside other rows", case.name, window, row)
        begin = end


def check_random(ops: Ops, device: torch.device, dtype: torch.dtype, examples: int) -> None:
    # Imported here, because machines with GPUs that run the tests marked cuda may lack it.
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    heads = st.sampled_from([(4, 4), (6, 2), (8, 1), (7, 1), (9, 3)])
    shapes = st.tuples(heads, st.sampled_from([8, 16, 24, 40, 64, 96]), st.sampled_from([4, 8, 16, 32]))
    windows = st.one_of(st.just(0), st.integers(1, 400))

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**31), shapes, windows, st.booleans())
    def holds(seed: int, shape: tuple[tuple[int, int], int, int], window: int, is_float8: bool) -> None:
        (n_heads, n_kv_heads), head_dim, block_size = shape
        of_case = (n_heads, n_kv_heads, head_dim, block_size)
        check_step(ops, Case(seed, of_case, dtype, device, is_float8=is_float8 and dtype != torch.float32), window)

    holds()


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
from tests.llama_core.execution.test_fused_attention import WIDE_SHAPES, check, check_random
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


GROWING = """
import torch
from llama_core.step_time import attention_splits as splits
splits.SPLIT_UNIT, splits.SPLIT_BITS, start = {}
from llama_core.execution.fused.kernels import TritonOps
from llama_core.scheduling.step import Row
from tests.llama_core.execution.test_fused_attention import Case, check_step

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
from llama_core.step_time import attention_splits as splits
splits.SPLIT_UNIT = 32
from llama_core.execution.fused import attention_kernels as kernels
from llama_core.execution.fused.kernels import TritonOps
from llama_core.scheduling.step import Row
from tests.llama_core.execution.test_fused_attention import Case, check_step

torch.use_deterministic_algorithms(True)  # fills the results of splits with NaN first
rows = [Row(0, 63, 9, True, 8), Row(1, 63, 9, False), Row(2, 48, 20, False), Row(3, 255, 1, True), Row(4, 0, 1, True)]
for batch_invariant in (False, True):
    for window in (0, 33):
        for kernels._WAVES in (1, 4, 44):
            case = Case(0, (1, 1, 16, 8), torch.float32, torch.device("cpu"), rows=rows)
            check_step(TritonOps(batch_invariant=batch_invariant), case, window)
"""


def test_queries_of_a_tile_see_other_splits_than_each_other_in_tritons_interpreter() -> None:
    """Windows of 33 positions: the first query sees splits 0 and 1, the next splits 1 and 2, whose results lie where those of 0
    did. Shares of programs end at borders of splits and beside them, and a chunk's tile of queries at one of positions."""
    interpret(BORDERS)


SHARED_OUT = """
import torch
from collections import Counter
from triton.runtime.interpreter import interpreter_builder
from llama_core.step_time import attention_splits as splits
splits.SPLIT_UNIT, splits.SPLIT_BITS = 32, 1
from llama_core.execution.fused import attention_kernels as kernels
from llama_core.execution.fused.kernels import TritonOps
from llama_core.scheduling.step import Row
from tests.llama_core.execution.test_fused_attention import Case

case = Case(0, (1, 1, 16, 16), torch.float32, torch.device("cpu"), rows=[Row(0, 2047, 1, True)])
tiles, attend_tile = Counter(), kernels._attend_tile

def counted(*args):
    tiles[interpreter_builder.grid_idx[2]] += 1
    return attend_tile(*args)

kernels._attend_tile = counted
longest = splits.longest_split(2048) // 32
for kernels._WAVES in (1, 2, 3, 5):  # a program each
    tiles.clear()
    case.attend(TritonOps(), case.rows, case.q, 0)
    assert sum(tiles.values()) == 64 and max(tiles.values()) < 64 / kernels._WAVES + longest, tiles
"""


def test_programs_of_a_decode_share_its_positions_where_later_splits_are_longer() -> None:
    """No program reads more than its share and the split at the end of it: the longest program's time is the kernel's."""
    interpret(SHARED_OUT)


@pytest.mark.parametrize("has_much", [False, True])
def test_a_tile_has_all_heads_that_share_a_key_head(has_much: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from llama_core.execution.fused import attention_kernels as kernels

    monkeypatch.setattr(kernels, "has_much_shared_memory", lambda: has_much)
    for group in (1, 7, 64, 71, 128):
        for dtype, head_dim, batch_invariant in itertools.product(LIMITS, (64, 128, 256), (False, True)):
            sizes = kernels.tile_sizes(2 * group, 2, head_dim, dtype, batch_invariant=batch_invariant)
            assert min(sizes) >= 1, (group, dtype, head_dim, batch_invariant)


@pytest.mark.parametrize("sm", TARGETS)
def test_each_target_has_room_for_buffers_that_are_loaded_ahead(sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton loads keys and values while it computes from 5 stages on: it then has two buffers of each, or three where products
    of 64 rows and more read both factors in shared memory."""
    pytest.importorskip("triton")
    from llama_core.execution.fused import attention_kernels as kernels
    from llama_core.execution.fused import shared_memory

    target = TARGETS[sm]
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": target.block_shared})
    active = SimpleNamespace(get_current_device=lambda: 0, utils=utils)
    monkeypatch.setattr(shared_memory, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(kernels, "has_much_shared_memory", shared_memory.has_much_shared_memory.__wrapped__)
    is_large = sm in (90, 100)
    for head_dim in (64, 128, 256):
        decode, chunk = kernels._launches(4, torch.bfloat16, head_dim, batch_invariant=False)
        for launch in (decode, chunk):
            buffers = 3 if is_large and launch.rows >= 64 else 2
            # What a decode writes to memory passes through shared memory in float32.
            written = launch.rows * head_dim * 4 if launch is decode else 0
            num_bytes = (launch.rows + 2 * buffers * launch.positions) * head_dim * 2 + written + 2048
            assert launch.num_stages == 5 and num_bytes <= target.block_shared, (head_dim, launch)
            if launch.most_registers is not None:
                programs = 65_536 // (launch.num_warps * 32 * launch.most_registers)
                assert programs == 4 and programs * num_bytes <= target.sm_shared, (head_dim, launch)
        assert (decode.most_registers is not None) == (is_large and head_dim == 128)
        # 64 heads that share a key head would spill up to 680 bytes of a thread with fewer registers.
        assert kernels._decode_launch(64, torch.bfloat16, head_dim).most_registers is None


def contiguous(case: Case, cache: torch.Tensor) -> torch.Tensor:
    """Every row's cached positions, one row after the other."""
    return cache.flatten(0, 1)[torch.cat([case.places(row, 0) for row in case.rows])]


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_kernel_computes_what_flash_attention_does_on_a_gpu(dtype: torch.dtype) -> None:
    from llama_core.execution.fused.kernels import TritonOps

    shapes = SHAPES + WIDE_SHAPES
    for seed in range(2 * len(shapes)):
        shape, window = shapes[seed % len(shapes)], COMPILED_WINDOWS[seed % len(COMPILED_WINDOWS)]
        case = Case(seed, shape, dtype, torch.device("cuda"))
        keys, values = (contiguous(case, cache) for cache in (case.keys, case.values))
        try:
            theirs = varlen_attention(case.q.contiguous(), keys, values, case.rows, window)()
        except ImportError as error:
            pytest.skip(str(error))
        got = case.attend(TritonOps(), case.rows, case.q, window)
        assert (got - theirs).abs().max().item() <= 2 * LIMITS[dtype], (seed, shape, window, case.rows)


def test_flash_attention_takes_the_rows_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is asked for, computed in float64: the test on a GPU has only its answers."""

    def varlen_attn(q, keys, values, q_bounds, k_bounds, max_q, max_k, *, window_size, enable_gqa):  # type: ignore[no-untyped-def]
        assert enable_gqa and (max_q, max_k) == (max(q_bounds.diff()), max(k_bounds.diff()))
        left, right = window_size
        assert right == 0 or (max_q == 1 and (left, right) == (-1, -1))
        parts, group = [], q.shape[1] // keys.shape[1]
        for i in range(len(q_bounds) - 1):
            own_q, own_k, own_v = (
                x[bounds[i] : bounds[i + 1]].double().transpose(0, 1)
                for x, bounds in ((q, q_bounds), (keys, k_bounds), (values, k_bounds))
            )
            count, length = own_q.shape[1], own_k.shape[1]
            # The last query sees the last key.
            distance = torch.arange(length - count, length)[:, None] - torch.arange(length)[None, :]
            seen = (distance >= 0) & ((distance <= left) | (left < 0))
            own_k, own_v = (x.repeat_interleave(group, dim=0) for x in (own_k, own_v))
            parts.append(torch.nn.functional.scaled_dot_product_attention(own_q, own_k, own_v, seen).transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    for seed in range(20):
        shape, window = SHAPES[seed % len(SHAPES)], WINDOWS[seed % len(WINDOWS)]
        case = Case(seed, shape, torch.float32, torch.device("cpu"))
        keys, values = (contiguous(case, cache) for cache in (case.keys, case.values))
        found = varlen_attention(case.q, keys, values, case.rows, window)()
        assert (found - case.expected(window)).abs().max().item() < 1e-6, (seed, case.rows)


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
    assert [longest_split(length) for length in (1, 128, 130, 8192, 8193, 8500)] == [1, 128, 128, 128, 128, 256]


def test_a_window_has_no_more_splits_than_are_counted() -> None:
    """Their results lie one behind the other, by the split's number modulo their count."""
    for window in (1, 2, 127, 128, 129, 4096, 9000, 40_000):
        for length in (1, 128, 4097, 8200, 16_500, 70_000):
            most = max(
                split_of(last) - split_of(max(0, last + 1 - window)) + 1 for last in range(max(0, length - 300), length)
            )
            assert most <= split_count(length, window) <= split_count(length, 0), (window, length)
