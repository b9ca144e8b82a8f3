"""The attention kernel alone: decodes beside the read bandwidth, and chunks of a prompt beside the product rate.

Calls are timed in a graph, as steps are run: the host needs longer to launch a small one than it takes. Few positions are
cached several times, so that no call finds its own in the GPU's cache.
Each beside torch's FlashAttention 2 of the same rows, which gets keys and values without pages. Decodes also with the block
tables and split results of a long max_seq_len, which must not take longer.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.clock import Clock, clock_of, product_tflop_s, rates, read_gb_s
from benchmarks.gpu.engine import model_of
from benchmarks.gpu.recorder import Recorder, median
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.varlen import varlen_attention
from benchmarks.harness.common import Spread
from llama_core.backends.fused.device import choose_ops
from llama_core.backends.fused.ops import TorchOps
from llama_core.backends.fused.step_plan import (
    SAMPLE_COLUMNS,
    TILE_COLUMNS,
    TOKEN_COLUMNS,
    AttentionTiles,
    StepArrays,
    TileSizes,
    plan_of,
)
from llama_core.backends.kv_cache import KVCache
from llama_core.model.config import ModelConfig
from llama_core.model.operations import Attend
from llama_core.scheduling.step import Row

BLOCK = 16
_COLD_BYTES = 2**28  # of positions in turn, which no cache holds
_MOST_COPIES = 32


def run(record: Recorder, settings: Settings) -> None:
    sizes, model, clock = settings.sizes, model_of(settings), clock_of(settings.device)
    (ops, _), dtype, repeats = choose_ops("fused", clock.device), getattr(torch, settings.dtype), sizes.repeats
    num_bytes = min(sizes.probe_bytes, int(clock.free_bytes() * 0.5))
    bandwidth = median(record.measure("read_gb_s", lambda: read_gb_s(clock, num_bytes, repeats)))
    size = sizes.product_size
    peak = median(record.measure("product_tflop_s", lambda: product_tflop_s(clock, size, size, size, dtype, repeats)))
    call = partial(_attention, clock, ops, model, dtype=dtype)

    def decodes(rows: list[Row], cached: int, max_seq_len: int = 0) -> dict[str, object]:
        times = _of_one(clock, [call(rows, max_seq_len=max_seq_len) for _ in range(_copies(cached))], repeats)
        reached = rates(times, cached / 1e6)
        return {"ms": times, "gb_s": reached, "share_of_bandwidth": reached.median / bandwidth}

    def chunk(row: Row) -> dict[str, object]:
        times = _of_one(clock, [call([row])], repeats)
        pairs = row.length * row.start + row.length * (row.length + 1) // 2
        reached = rates(times, 4 * pairs * model.query_width / 1e9)
        return {"ms": times, "tflop_s": reached, "share_of_products": reached.median / peak}

    def beside(name: str, rows: list[Row], copies: int = 1) -> None:
        """FlashAttention 2 of the same rows, where it can compute them."""
        if clock.device.type == "cuda" and dtype != torch.float32:
            record.measure(
                f"flash_attention_2_{name}", lambda: _flash_attention(clock, model, rows, dtype, repeats, copies)
            )

    for length in sizes.attention_lengths:
        for count in sizes.attention_rows:
            cached = 2 * count * length * model.kv_width * dtype.itemsize
            if cached > clock.free_bytes() * 0.7:
                continue
            rows, name = [Row(slot, length - 1, 1, True) for slot in range(count)], f"{count}_rows_of_{length}"
            record.measure(name, partial(decodes, rows, cached))
            beside(name, rows, _copies(cached))
            record.measure(f"{name}_in_{sizes.long_context}", partial(decodes, rows, cached, sizes.long_context))
        of_prompt = min(sizes.prompt, length)
        row = Row(0, length - of_prompt, of_prompt, True)
        name = f"chunk_of_{of_prompt}_at_{row.start}"
        record.measure(name, partial(chunk, row))
        beside(name, [row])


def _copies(cached: int) -> int:
    """Of so many cached bytes."""
    return max(1, min(_MOST_COPIES, _COLD_BYTES // cached))


def _of_one(clock: Clock, calls: list[Callable[[], torch.Tensor]], repeats: int) -> Spread:
    """Milliseconds of one of the calls, in a graph of all."""

    def all_of_them() -> None:
        for call in calls:
            call()

    return clock.milliseconds(clock.recorded(all_of_them), repeats).scaled(1 / len(calls))


def _flash_attention(
    clock: Clock, model: ModelConfig, rows: list[Row], dtype: torch.dtype, repeats: int, copies: int
) -> dict[str, object]:
    def call() -> Callable[[], torch.Tensor]:
        counts = sum(row.length for row in rows), sum(row.start + row.length for row in rows)
        q, keys, values = (
            torch.randn(count, heads, model.head_dim, device=clock.device, dtype=dtype)
            for count, heads in ((counts[0], model.n_heads), *[(counts[1], model.n_kv_heads)] * 2)
        )
        return varlen_attention(q, keys, values, rows)

    try:
        return {"ms": _of_one(clock, [call() for _ in range(copies)], repeats)}
    except (ImportError, RuntimeError) as error:  # this build of torch, or this GPU
        return {"lacks": str(error).partition("\n")[0]}


def _attention(
    clock: Clock, ops: TorchOps, model: ModelConfig, rows: list[Row], dtype: torch.dtype, max_seq_len: int = 0
) -> Callable[[], torch.Tensor]:
    """One layer's attention of these rows, over blocks in random order. max_seq_len: of the block tables, at least."""
    device = clock.device
    longest = max(row.start + row.length for row in rows)
    per_row = -(-longest // BLOCK)
    order = torch.randperm(len(rows) * per_row, device=device).view(len(rows), per_row)
    shape = (order.numel(), BLOCK, model.n_kv_heads, model.head_dim)
    cache = KVCache(*(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)))
    tokens = sum(row.length for row in rows)
    q = torch.randn(tokens, model.n_heads, model.head_dim, device=device, dtype=dtype)
    tiles = attention_tiles(rows, ops.tile_sizes(model.n_heads, model.n_kv_heads, model.head_dim, dtype), device)
    tables = torch.zeros((len(rows), max(per_row, max_seq_len // BLOCK)), dtype=torch.int64, device=device)
    tables[:, :per_row] = order
    return partial(ops.attend, q, cache, tables, tiles, Attend())


def attention_tiles(rows: list[Row], sizes: TileSizes, device: torch.device) -> AttentionTiles:
    """The tiles of a step of these rows."""
    plan = plan_of(rows, sizes)
    count, decodes, chunks = plan.shape
    arrays = StepArrays(
        np.zeros((SAMPLE_COLUMNS, len(plan.sampled_slots)), np.int64),
        np.zeros((TOKEN_COLUMNS, count), np.int64),
        np.zeros((decodes, TILE_COLUMNS), np.int64),
        np.zeros((chunks, TILE_COLUMNS), np.int64),
    )
    plan.write(arrays, 0)
    return AttentionTiles(torch.from_numpy(arrays.decodes).to(device), torch.from_numpy(arrays.chunks).to(device))
