"""`llama-ray estimate`: the memory of each rank, from a checkpoint's header alone."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from deployments.args import ServerArgs
from deployments.local.config_file import IMPORT_PATH
from deployments.local.model_argument import estimate_of, read_argument
from llama_core.errors import ConfigError, LlamaError
from llama_core.remote.store import by_name
from llama_core.sizes import format_bytes

if TYPE_CHECKING:
    from llama_core.backends.memory_estimate import MemoryEstimate

CONTEXTS = (512, 2048, 4096, 8192, 16384, 32768, 131072)
BATCHES = (1, 4, 8, 16, 32, 64)
# Memory of GPUs, as nvidia-smi reports it.
_MIB = {
    **{"rtx3090": 24_576, "a10": 23_028, "a100-40": 40_960, "a100": 81_920, "l4": 23_034, "l40s": 46_068},
    **{"rtx4090": 24_564, "h100": 81_559, "h200": 143_771, "b200": 183_359, "rtx5090": 32_607},
}
GPU_BYTES: Final = {name: mib * 2**20 for name, mib in _MIB.items()}
# Of the CUDA context and the libraries' workspaces, which torch counts neither as allocated nor as free.
_CONTEXT_BYTES: Final = 600 * 2**20


def run(ckpt: str, given: Mapping[str, Any], gpu: str | None, *, as_json: bool) -> int:
    """Print the estimate. Returns the exit status. ckpt: a model, or a configuration file, whose arguments count where `given`
    has none."""
    args = None
    try:
        args = server_args(ckpt, given)
        estimate, context = estimate_of(args, on_gpu=gpu is not None)
        grid = _grid(estimate, context)
        shown = as_data(estimate, grid)
        if gpu is not None:
            shown["gpu"] = _cache_on_gpu(estimate, gpu)
        if as_json:
            print(json.dumps(shown))
            return 0
        _show(estimate, grid, shown.get("gpu"))
    except (LlamaError, MemoryError) as error:
        print(f"estimate: {by_name(str(error), args.downloads if args is not None else ())}", file=sys.stderr)
        return 1
    return 0


def server_args(ckpt: str, given: Mapping[str, Any]) -> ServerArgs:
    """The server's arguments for a model, or those of a configuration file, overridden by `given`. Raises LlamaError."""
    args = read_argument(ckpt, ()).with_args(given).server_args
    if args is None:
        raise ConfigError(f"{ckpt}: its first application is not {IMPORT_PATH}")
    return args.pinned()


def as_data(estimate: "MemoryEstimate", grid: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The estimate in bytes, as `--json` prints it. grid: [max_seq_len, max_batch_size, bytes of the largest rank]."""
    config = estimate.config
    return {
        "checkpoint": config.ckpt_dir,
        "backend": estimate.backend,
        "device": str(estimate.device),
        "format": str(estimate.plan),
        "expansion": estimate.expansion,
        "max_seq_len": config.max_seq_len,
        "max_batch_size": config.max_batch_size,
        "ranks": [{**asdict(one), "total": one.total} for one in estimate.ranks],
        "total": sum(one.total for one in estimate.ranks),
        "least_cache": estimate.least_cache,
        "by_context_and_concurrency": [
            {"max_seq_len": length, "max_batch_size": batch, "rank_total": total} for length, batch, total in grid
        ],
    }


def _cache_on_gpu(estimate: "MemoryEstimate", gpu: str) -> dict[str, Any]:
    """What weights and working memory leave for the cache on the rank that has least left; negative where they do not fit."""
    from llama_core.backends.memory_budget import GPU_HEADROOM

    taken = max(one.weights + one.working for one in estimate.ranks)
    free = int(GPU_BYTES[gpu] * (1 - GPU_HEADROOM)) - _CONTEXT_BYTES - taken
    if (limit := estimate.config.kv_cache_bytes) is not None:
        free = min(free, limit)
    tokens = max(0, free // estimate.block_bytes) * estimate.config.block_size
    return {"name": gpu, "ranks": estimate.num_ranks, "cache_bytes": free, "cache_tokens": tokens}


def _grid(estimate: "MemoryEstimate", context: int | None) -> list[tuple[int, int, int]]:
    """The largest rank's bytes for contexts up to the model's own, or to the configured one, and for numbers of sequences."""
    config = estimate.config
    longest = max(context or 0, config.max_seq_len)
    lengths = sorted({*(length for length in CONTEXTS if length <= longest), config.max_seq_len})
    batches = sorted({*BATCHES, config.max_batch_size})
    return [(length, batch, estimate.largest(length, batch).total) for length in lengths for batch in batches]


def _show(estimate: "MemoryEstimate", grid: Sequence[tuple[int, int, int]], on_gpu: dict[str, Any] | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from llama_core.host.memory import available_host_bytes

    config, console = estimate.config, Console()
    console.print(
        f"{config.ckpt_dir}: {estimate.plan}, {estimate.backend} backend on {estimate.device}",
        highlight=False,
        markup=False,
    )
    if estimate.expansion:
        console.print(f"{estimate.expansion}.", highlight=False)
    table = Table(
        title=f"Memory of each rank: max_seq_len {config.max_seq_len:,}, max_batch_size {config.max_batch_size}"
    )
    for column in ("rank", "weights", "cache", "working", "total"):
        table.add_column(column, justify="right")
    for one in estimate.ranks:
        table.add_row(str(one.rank), *(format_bytes(n) for n in (one.weights, one.cache, one.working, one.total)))
    if len(estimate.ranks) > 1:
        sums = [sum(getattr(one, part) for one in estimate.ranks) for part in ("weights", "cache", "working", "total")]
        table.add_row("all", *map(format_bytes, sums))
    console.print(table)
    table = Table(title="Memory of one rank by context (rows) and sequences at once (columns)")
    for column in ("max_seq_len", *dict.fromkeys(str(batch) for _, batch, _ in grid)):
        table.add_column(column, justify="right")
    for length, row in groupby(grid, lambda one: one[0]):
        table.add_row(f"{length:,}", *(format_bytes(total) for _, _, total in row))
    console.print(table)
    if estimate.device.type == "cpu":
        console.print(
            f"Free on this machine: {format_bytes(available_host_bytes())}. Without kv_cache_bytes the ranks give the cache "
            f"at most half of what is free after loading, and need {format_bytes(estimate.least_cache)} each for one "
            "sequence. An empty rank process takes 0.2 GB more.",
            highlight=False,
        )
    if on_gpu is not None:
        free, tokens = on_gpu["cache_bytes"], on_gpu["cache_tokens"]
        text = f"a cache of {format_bytes(free)}, {tokens:,} tokens"
        if free < 0:
            text = f"the weights do not fit: {format_bytes(-free)} too many. Give more --ranks."
        console.print(f"Each rank on {on_gpu['name']}: {text}", highlight=False)
