"""Checks attention of random steps over a paged cache against attention in float64.

The cache holds NaN wherever no token of the step's sequences lies, so that a kernel that reads outside them returns NaN.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from llama_core.backends.fused.ops import TorchOps
from llama_core.backends.fused.step_plan import TILE_COLUMNS, AttentionTiles, StepArrays, TileSizes, plan_of
from llama_core.backends.kv_cache import FLOAT8_BYTES, KVCache, cached_as
from llama_core.model.operations import Attend
from llama_core.scheduling.step import Row

# (query heads, key heads, head_dim, block size in tokens)
SHAPES = ((4, 4, 16, 16), (6, 2, 24, 4), (8, 1, 64, 32), (7, 1, 16, 8))
WIDE_SHAPES = ((4, 1, 128, 16), (2, 1, 256, 16), (3, 1, 96, 16), (2, 1, 160, 16), (1, 1, 192, 16))
LENGTHS = (1, 2, 5, 17, 70)
STARTS = (0, 1, 15, 127, 128, 150, 300)
WINDOWS = (0, 1, 40, 129, 1000)
COMPILED_WINDOWS = (0, 129)  # on a GPU, which compiles a kernel for each window; the interpreter runs all of WINDOWS
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
# The relative error of a GPU's ex2.approx is 2^-22, that of NumPy's exp2 2^-24.
FLOAT32_LIMIT = 5e-6 if torch.cuda.is_available() else 2e-6
LIMITS = {torch.float32: FLOAT32_LIMIT, torch.float16: 4e-3, torch.bfloat16: 0.04}


def random_rows(generator: np.random.Generator, count: int) -> list[Row]:
    """Decodes, decodes with drafts, prefill chunks that end their prompt and chunks that do not."""
    rows = []
    for slot in generator.permutation(count).tolist():
        start = int(generator.choice(STARTS))
        num_drafts = int(generator.choice([-1, 0, 1, 8]))
        if num_drafts < 0:
            rows.append(Row(slot, start, int(generator.choice(LENGTHS)), bool(generator.integers(2))))
        else:
            rows.append(Row(slot, start, 1 + num_drafts, True, num_drafts))
    return rows


def planned(rows: Seq[Row], sizes: TileSizes) -> StepArrays:
    """The plan of a step, written over arrays of -9, which no plan contains."""
    plan = plan_of(rows, sizes)
    tokens, decode_tokens, chunk_tiles = plan.shape
    shapes = (3, len(plan.sampled_slots)), (2, tokens), (decode_tokens, TILE_COLUMNS), (chunk_tiles, TILE_COLUMNS)
    arrays = StepArrays(*(np.full(shape, -9) for shape in shapes))
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
        """is_float8: the cache is float8. rows: random rows if None."""
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
        # A strided view, like the queries of the backend.
        qkv = torch.randn(sum(row.length for row in self.rows), self.n_heads + 2, self.head_dim)
        self.q = qkv.to(device, dtype)[:, : self.n_heads]

    def places(self, row: Row, first: int) -> torch.Tensor:
        position = torch.arange(first, row.start + row.length, device=self.device)
        return self.tables[row.slot, position // self.block_size] * self.block_size + position % self.block_size

    def attend(self, ops: TorchOps, rows: Seq[Row], q: torch.Tensor, window: int) -> torch.Tensor:
        sizes = ops.tile_sizes(self.n_heads, self.n_kv_heads, self.head_dim, self.dtype)
        arrays = planned(rows, sizes)
        tiles = AttentionTiles(*(torch.from_numpy(part).to(self.device) for part in (arrays.decodes, arrays.chunks)))
        return ops.attend(q, KVCache(self.keys, self.values), self.tables, tiles, Attend(window))

    def expected(self, window: int) -> torch.Tensor:
        """Attention in float64, token by token."""
        parts, group, token = [], self.n_heads // self.n_kv_heads, 0
        for row in self.rows:
            keys, values = (
                as_numbers(cache).flatten(0, 1)[self.places(row, 0)].double().repeat_interleave(group, dim=1)
                for cache in (self.keys, self.values)
            )
            for position in range(row.start, row.start + row.length):
                seen = slice(first_seen(position, window), position + 1)
                scores = torch.einsum("hd,lhd->hl", self.q[token].double(), keys[seen]) * self.head_dim**-0.5
                parts.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values[seen]))
                token += 1
        return torch.stack(parts)

    def forget_before_windows(self, window: int) -> None:
        """Fill the blocks before all windows of each row with NaN, because they may belong to other sequences."""
        for row in self.rows:
            stale = self.places(row, 0)[: first_seen(row.start, window) // self.block_size * self.block_size]
            for cache in (self.keys, self.values):
                cache.flatten(0, 1)[stale] = FLOAT8_NAN if cache.dtype == FLOAT8_BYTES else float("nan")


def first_seen(position: int, window: int) -> int:
    """A negative window is a chunk."""
    return position - position % -window if window < 0 else max(0, position + 1 - window) if window else 0


def as_numbers(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.float8_e4m3fn).float() if cache.dtype == FLOAT8_BYTES else cache


def check(
    ops: TorchOps,
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


def attended(ops: TorchOps, case: Case, window: int) -> torch.Tensor:
    """All rows in one step, within the limit of float64."""
    expected = case.expected(window)
    if window:
        case.forget_before_windows(window)
    got = case.attend(ops, case.rows, case.q, window)
    difference = (got.double() - expected).abs().max().item()
    assert difference <= LIMITS[case.dtype], (case.name, window, case.rows, difference)
    return got


def check_step(ops: TorchOps, case: Case, window: int) -> None:
    """Each row alone has the same bits as in the step."""
    got, begin = attended(ops, case, window), 0
    for row in case.rows:
        end = begin + row.length
        alone = case.attend(ops, [row], case.q[begin:end], window)
        assert torch.equal(alone, got[begin:end]), ("beside other rows", case.name, window, row)
        begin = end


def check_random(ops: TorchOps, device: torch.device, dtype: torch.dtype, examples: int) -> None:
    for seed in range(examples):
        draw = np.random.default_rng(seed)
        n_heads, n_kv_heads = draw.choice([(4, 4), (6, 2), (8, 1), (7, 1), (9, 3)]).tolist()
        shape = n_heads, n_kv_heads, int(draw.choice([8, 16, 24, 40, 64, 96])), int(draw.choice([4, 8, 16, 32]))
        window = int(draw.integers(1, 400)) * int(draw.choice([0, 1, -1]))
        is_float8 = dtype != torch.float32 and bool(draw.integers(2))
        check_step(ops, Case(seed, shape, dtype, device, is_float8=is_float8), window)
