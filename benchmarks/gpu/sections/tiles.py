"""Tiles of matrix products inside a decode step's layers: the time with each candidate beside that with the chosen tiles.

A product alone does not show how its programs share the GPU with the kernels around it.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from benchmarks.gpu.clock import Clock, clock_of
from benchmarks.gpu.engine import model_of
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.sections.attention import BLOCK, attention_tiles
from benchmarks.gpu.settings import Settings
from benchmarks.harness.make_checkpoint import weight_shapes
from llama_core.execution.fused.all_reduce import GroupAllReduce
from llama_core.execution.fused.model import FusedTransformer
from llama_core.execution.fused.ops import Ops
from llama_core.execution.fused.ops_choice import ops_for
from llama_core.execution.fused.product_choice import of_few_rows
from llama_core.execution.fused.step_clock import NUM_SUMS, StepClock
from llama_core.execution.fused.step_plan import StepTensors
from llama_core.execution.kv_cache import CacheShape, KVCache
from llama_core.execution.parallel import Parallel
from llama_core.execution.weight_formats.format import HeldWeights, TorchMatrixType, find_weight_format
from llama_core.model_config import ModelConfig
from llama_core.scheduling.step import Row
from llama_core.step_time.fused_products import MOST_ROWS

if TYPE_CHECKING:
    from llama_core.execution.fused.product_kernels import Tiles

_ROUNDS: Final = 7
_REPLAYS: Final = 4
# By the most rows of a step, then the product: gate and up; one with many outputs, such as qkv; one with few, such as out and
# down. Each has the fields of `Tiles` in their order.
CANDIDATES: Final = {
    1: {
        "gated": ["16 64 128 3 4 128", "16 64 128 4 4 128", "16 32 128 4 4 128", "1 32 128 4 4 128"],
        "many": ["1 16 256 4 4 256", "1 32 256 4 4 128", "16 32 128 4 4 128", "16 64 128 4 4 128"],
        "few": ["1 16 256 6 4 256", "1 32 256 4 4 256", "16 32 128 6 4 256", "16 64 128 4 4 128"],
    },
    16: {
        "gated": ["16 64 128 3 4 128", "16 64 128 4 4 128", "16 64 128 5 4 128", "16 32 128 4 4 128"],
        "many": ["16 32 128 5 4 256", "16 64 128 4 4 128", "16 32 128 4 4 128"],
        "few": ["16 32 128 6 4 256", "16 64 128 5 4 128", "16 64 128 4 4 128", "16 32 128 4 4 256"],
    },
    64: {
        "gated": ["64 128 64 4 8 128", "64 64 64 4 4 128", "64 64 64 5 4 128", "64 32 128 3 4 128"],
        "many": ["64 64 128 3 4 128", "64 32 128 4 4 128", "64 32 128 3 4 128", "64 64 64 6 4 128"],
        "few": ["64 64 128 5 8 128", "64 64 128 4 8 128", "64 64 64 8 4 128", "64 32 128 4 4 256"],
    },
}


class TriedTiles:
    """A `TileChoice`: the chosen tiles, but for one kind of products those that are tried."""

    def __init__(self) -> None:
        self._kind = ""
        self._tried: Tiles | None = None

    def __call__(self, weights: HeldWeights, rows: int, dtype: torch.dtype, is_gated: bool) -> "Tiles":
        from llama_core.execution.fused.product_kernels import has_many_outputs, tiles_of

        kind = "gated" if is_gated else "many" if has_many_outputs(weights) else "few"
        return self._tried if self._tried and kind == self._kind else tiles_of(weights, rows, dtype, is_gated)

    def try_tiles(self, kind: str, text: str) -> None:
        from llama_core.execution.fused.product_kernels import Tiles

        self._kind, self._tried = kind, Tiles(*map(int, text.split()))

    def try_none(self) -> None:
        self._tried = None


def run(record: Recorder, settings: Settings) -> None:
    sizes, clock = settings.sizes, clock_of(settings.device)
    assert max(sizes.rows) <= MOST_ROWS, "larger products are cuBLAS's"
    if record.has(*(f"{rows}_rows" for rows in sizes.rows)):
        return
    choice, ops = TriedTiles(), ops_for(clock.device)
    if settings.device == "cuda":
        from llama_core.execution.fused.kernels import TritonOps

        ops = TritonOps(fuses=of_few_rows, choose_tiles=choice)
    with torch.inference_mode():
        model = _random_model(settings, ops, clock.device)
        for rows in sizes.rows:
            record.measure(f"{rows}_rows", partial(_compared, clock, model, ops, choice, rows, settings))


def _compared(
    clock: Clock, model: FusedTransformer, ops: Ops, choice: TriedTiles, rows: int, settings: Settings
) -> dict[str, Any]:
    """chosen_ms: of all layers; of each candidate the ratio to that, the median of alternating rounds."""
    work = _layers(model, ops, rows, min(settings.sizes.prompt // 4, settings.sizes.context // 2))
    choice.try_none()
    graphs = {"chosen_ms": clock.recorded(work)}
    if settings.device == "cuda":
        for kind, texts in next(kinds for most, kinds in CANDIDATES.items() if rows <= most).items():
            for text in texts:
                choice.try_tiles(kind, text)
                graphs[f"{kind} {text}"] = clock.recorded(work)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_ROUNDS):
        for name, graph in graphs.items():
            times[name].append(clock.milliseconds(graph, _REPLAYS).median)
    chosen = times.pop("chosen_ms")
    ratios = {name: [one / base for one, base in zip(found, chosen, strict=True)] for name, found in times.items()}
    medians = {name: statistics.median(found) for name, found in ratios.items()}
    return {"chosen_ms": statistics.median(chosen), **medians}


def _random_model(settings: Settings, ops: Ops, device: torch.device) -> FusedTransformer:
    config, dtype, parallel = model_of(settings), getattr(torch, settings.dtype), Parallel(0, 1, device)
    sizes, all_reduce = settings.sizes, GroupAllReduce(parallel, ops)
    weights = _weights(config, dtype, device)
    return FusedTransformer(config, parallel, sizes.context, dtype, ops, _matrix_type(settings), weights, all_reduce)


def _matrix_type(settings: Settings) -> Callable[[str], TorchMatrixType]:
    made = find_weight_format(settings.dtype).torch_matrix
    assert made is not None
    return lambda name: made


def _weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in weight_shapes(config):
        weight = torch.randn(shape, dtype=dtype, device=device)
        yield name, weight if len(shape) == 1 else weight * shape[1] ** -0.5


def _layers(model: FusedTransformer, ops: Ops, rows: int, context: int) -> Callable[[], torch.Tensor]:
    """The embedding and all layers of a decode step of `rows` sequences with `context` cached positions each."""
    device, per_row = model.parallel.device, context // BLOCK + 1
    cache = KVCache(CacheShape.of(model.config, BLOCK, model.parallel, model.dtype), rows * per_row, device)
    for cached in (cache.keys, cache.values):
        cached.normal_()  # zeros need less power, and may be read faster
    tables = torch.arange(rows * per_row, device=device).view(rows, per_row)
    sizes = ops.tile_sizes(model.n_heads, model.n_kv_heads, model.head_dim, model.dtype)
    tiles = attention_tiles([Row(slot, context, 1, True) for slot in range(rows)], sizes, device)
    slots, positions = torch.arange(rows, device=device), torch.full((rows,), context, device=device)
    tokens = slots[:, None].repeat(1, context + 1)
    step = StepTensors(slots, positions, tiles)
    clock = StepClock(ops, torch.zeros(NUM_SUMS, dtype=torch.int64, device=device))

    def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
        return ops.attend(q, cache.keys[layer], cache.values[layer], tables, tiles, model.config.window(layer))

    return lambda: model.hidden_states(step, tokens, tables, cache, attend, clock)
