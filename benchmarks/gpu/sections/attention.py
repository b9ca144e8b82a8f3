"""The attention kernel alone: decodes beside the read bandwidth, and chunks of a prompt beside the product rate.

Calls are timed in a graph, as steps are run: the host needs longer to launch a small one than it takes. Few positions are
cached several times, so that no call finds its own in the GPU's cache.
Each beside torch's FlashAttention 2 of the same rows, which gets keys and values without pages; last, which of the two is
faster on prompts. Decodes also with the block
tables and split results of a long max_seq_len, which must not take longer.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.clock import Clock, clock_of, product_tflop_s, rates, read_gb_s
from benchmarks.gpu.engine import model_of
from benchmarks.gpu.recorder import Recorder, median
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.varlen import varlen_attention
from benchmarks.harness.common import Spread
from llama_core.execution.fused.device import choose_ops
from llama_core.execution.fused.ops import TorchOps
from llama_core.execution.fused.step_plan import (
    SAMPLE_COLUMNS,
    TILE_COLUMNS,
    TOKEN_COLUMNS,
    AttentionTiles,
    StepArrays,
    TileSizes,
    plan_of,
)
from llama_core.model_config import ModelConfig
from llama_core.scheduling.step import Row

BLOCK = 16
_COLD_BYTES = 2**28  # of positions in turn, which no cache holds
_MOST_COPIES = 32


def run(record: Recorder, settings: Settings) -> None:
    sizes, model, clock = settings.sizes, model_of(settings), clock_of(settings.device)
    (ops, _), dtype = choose_ops("fused", clock.device), getattr(torch, settings.dtype)
    num_bytes = min(sizes.probe_bytes, int(clock.free_bytes() * 0.5))
    record.measure("read_gb_s", lambda: read_gb_s(clock, num_bytes, sizes.repeats))
    size = sizes.product_size
    record.measure("product_tflop_s", lambda: product_tflop_s(clock, size, size, size, dtype, sizes.repeats))
    bandwidth, product_rate = median(record.figures["read_gb_s"]), median(record.figures["product_tflop_s"])
    itemsize = dtype.itemsize
    for length in sizes.attention_lengths:
        for rows in sizes.attention_rows:
            cached = 2 * rows * length * model.kv_width * itemsize
            if cached > clock.free_bytes() * 0.7:
                continue
            work = [Row(slot, length - 1, 1, True) for slot in range(rows)]
            record.measure(
                f"{rows}_rows_of_{length}",
                partial(_decodes, clock, ops, model, work, cached, bandwidth, dtype, sizes.repeats),
            )
            _beside(record, f"{rows}_rows_of_{length}", clock, model, work, dtype, sizes.repeats, _copies(cached))
            record.measure(
                f"{rows}_rows_of_{length}_in_{sizes.long_context}",
                partial(_decodes, clock, ops, model, work, cached, bandwidth, dtype, sizes.repeats, sizes.long_context),
            )
        chunk = min(sizes.prompt, length)
        row = Row(0, length - chunk, chunk, True)
        record.measure(
            f"chunk_of_{chunk}_at_{length - chunk}",
            partial(_chunk, clock, ops, model, row, product_rate, dtype, sizes.repeats),
        )
        _beside(record, f"chunk_of_{chunk}_at_{length - chunk}", clock, model, [row], dtype, sizes.repeats)
    for name, value in faster_on_prompts(record.figures).items():
        record.put(name, value)


def _decodes(
    clock: Clock,
    ops: TorchOps,
    model: ModelConfig,
    rows: list[Row],
    cached: int,
    bandwidth: float,
    dtype: torch.dtype,
    n: int,
    max_seq_len: int = 0,
) -> dict[str, object]:
    calls = [_attention(clock, ops, model, rows, dtype, max_seq_len) for _ in range(_copies(cached))]
    times = _of_one(clock, calls, n)
    reached = rates(times, cached / 1e6)
    return {"ms": times, "gb_s": reached, "share_of_bandwidth": reached.median / bandwidth}


def _copies(cached: int) -> int:
    """Of so many cached bytes."""
    return max(1, min(_MOST_COPIES, _COLD_BYTES // cached))


def _of_one(clock: Clock, calls: list[Callable[[], torch.Tensor]], repeats: int) -> Spread:
    """Milliseconds of one of the calls, in a graph of all."""

    def all_of_them() -> None:
        for call in calls:
            call()

    return clock.milliseconds(clock.recorded(all_of_them), repeats).scaled(1 / len(calls))


def _chunk(
    clock: Clock, ops: TorchOps, model: ModelConfig, row: Row, product_rate: float, dtype: torch.dtype, n: int
) -> dict[str, object]:
    times = _of_one(clock, [_attention(clock, ops, model, [row], dtype)], n)
    pairs = row.length * row.start + row.length * (row.length + 1) // 2
    reached = rates(times, 4 * pairs * model.query_width / 1e9)
    return {"ms": times, "tflop_s": reached, "share_of_products": reached.median / product_rate}


def _beside(
    record: Recorder,
    name: str,
    clock: Clock,
    model: ModelConfig,
    rows: list[Row],
    dtype: torch.dtype,
    n: int,
    copies: int = 1,
) -> None:
    """FlashAttention 2 of the same rows, where it can compute them."""
    if clock.device.type != "cuda" or dtype == torch.float32:
        return

    def call() -> Callable[[], torch.Tensor]:
        q, keys, values = (
            torch.randn(count, heads, model.head_dim, device=clock.device, dtype=dtype)
            for count, heads in (
                (sum(row.length for row in rows), model.n_heads),
                *[(sum(row.start + row.length for row in rows), model.n_kv_heads)] * 2,
            )
        )
        return varlen_attention(q, keys, values, rows)

    def measured() -> object:
        try:
            return {"ms": _of_one(clock, [call() for _ in range(copies)], n)}
        except (ImportError, RuntimeError) as error:  # this build of torch, or this GPU
            return {"lacks": str(error).partition("\n")[0]}

    record.measure(f"flash_attention_2_{name}", measured)


def faster_on_prompts(figures: Mapping[str, Any]) -> dict[str, str | float]:
    """For each chunk that both computed: our time over FlashAttention 2's; then which of the two is faster on all of them."""
    prefix = "flash_attention_2_"
    ratios: dict[str, str | float] = {
        f"ours_over_{prefix}{name}": median(figure["ms"]) / median(figures[f"{prefix}{name}"]["ms"])
        for name, figure in figures.items()
        if name.startswith("chunk_") and "ms" in figures.get(f"{prefix}{name}", {})
    }
    if not ratios:
        return {}
    is_slower = [float(ratio) > 1 for ratio in ratios.values()]
    faster = "FlashAttention 2" if all(is_slower) else "depends on the length" if any(is_slower) else "ours"
    return ratios | {"faster_on_prompts": faster}


def _attention(
    clock: Clock, ops: TorchOps, model: ModelConfig, rows: list[Row], dtype: torch.dtype, max_seq_len: int = 0
) -> Callable[[], torch.Tensor]:
    """One layer's attention of these rows, over blocks in random order. max_seq_len: of the block tables, at least."""
    device = clock.device
    longest = max(row.start + row.length for row in rows)
    per_row = -(-longest // BLOCK)
    order = torch.randperm(len(rows) * per_row, device=device).view(len(rows), per_row)
    shape = (order.numel(), BLOCK, model.n_kv_heads, model.head_dim)
    keys, values = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    tokens = sum(row.length for row in rows)
    q = torch.randn(tokens, model.n_heads, model.head_dim, device=device, dtype=dtype)
    tiles = attention_tiles(rows, ops.tile_sizes(model.n_heads, model.n_kv_heads, model.head_dim, dtype), device)
    tables = torch.zeros((len(rows), max(per_row, max_seq_len // BLOCK)), dtype=torch.int64, device=device)
    tables[:, :per_row] = order
    return partial(ops.attend, q, keys, values, tables, tiles)


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
