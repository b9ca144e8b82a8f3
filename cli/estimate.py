"""`llama-ray estimate`: the memory of each rank, and the time of a step on a GPU, from a checkpoint's header alone."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.gpu_estimate import gpu_estimate
from llama_core.config import DEFAULT_STEP_TOKENS, UNKNOWN_CONTEXT, BackendName, CacheDType, Device, DType, EngineConfig
from llama_core.errors import LlamaError
from llama_core.sizes import format_bytes
from llama_core.step_time.devices import find_gpu

if TYPE_CHECKING:
    from llama_core.memory_estimate import MemoryEstimate

CONTEXTS = (512, 2048, 4096, 8192, 16384, 32768, 131072)
BATCHES = (1, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Request:
    """What to estimate. None: as the server would choose it."""

    ckpt: Path
    ranks: int | None = None
    max_seq_len: int | None = None
    batch: int = 32
    dtype: DType = "auto"
    quantization: str = "auto"
    tokenizer: Path | None = None
    device: Device = "auto"
    backend: BackendName = "auto"
    block_size: int = 16
    kv_cache_bytes: int | None = None
    kv_cache_dtype: CacheDType = "auto"
    gpu: str | None = None
    context: int = 1024


def run(request: Request, *, as_json: bool) -> int:
    """Print the estimate. Returns the exit status."""
    try:
        gpu = find_gpu(request.gpu) if request.gpu is not None else None
        estimate, context = make(request)
        shown = as_data(estimate, _grid(estimate, context))
        on_gpu = gpu_estimate(estimate, gpu, request.context) if gpu is not None else None
        if as_json:
            print(json.dumps(shown if on_gpu is None else shown | {"gpu": on_gpu.as_data()}))
            return 0
        _show(estimate, shown)
        if on_gpu is not None:
            on_gpu.show()
    except (LlamaError, MemoryError) as error:
        print(f"estimate: {error}", file=sys.stderr)
        return 1
    return 0


def make(request: Request) -> tuple["MemoryEstimate", int | None]:
    """The estimate, and the model's own context. Raises CheckpointError, ConfigError or TokenizerError."""
    import torch

    from llama_core.memory_estimate import describe_checkpoint, estimate_memory

    path, model, num_shards = describe_checkpoint(request.ckpt, request.tokenizer)
    config = EngineConfig(
        str(path),
        model.vocab_size,
        request.max_seq_len or model.context_length or UNKNOWN_CONTEXT,
        request.batch,
        max_step_tokens=max(DEFAULT_STEP_TOKENS, request.batch),
        dtype=request.dtype,
        quantization=request.quantization,
        device=request.device,
        backend=request.backend,
        block_size=request.block_size,
        kv_cache_bytes=request.kv_cache_bytes,
        kv_cache_dtype=request.kv_cache_dtype,
    )
    on_gpu = request.gpu is not None or request.device == "cuda"
    device = torch.device("cuda") if on_gpu else None  # which this machine need not have
    return estimate_memory(config, request.ranks or num_shards, device), model.context_length


def as_data(estimate: "MemoryEstimate", grid: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The estimate in bytes, as `--json` prints it. grid: [max_seq_len, max_batch_size, bytes of the largest rank]."""
    config = estimate.config
    ranks = [
        {"rank": one.rank, "weights": one.weights, "cache": one.cache, "working": one.working, "total": one.total}
        for one in estimate.ranks
    ]
    return {
        "checkpoint": config.ckpt_dir,
        "backend": estimate.backend,
        "device": str(estimate.device),
        "format": str(estimate.plan),
        "max_seq_len": config.max_seq_len,
        "max_batch_size": config.max_batch_size,
        "ranks": ranks,
        "total": sum(one.total for one in estimate.ranks),
        "least_cache": estimate.least_cache,
        "by_context_and_concurrency": [
            {"max_seq_len": length, "max_batch_size": batch, "rank_total": total} for length, batch, total in grid
        ],
    }


def _grid(estimate: "MemoryEstimate", context: int | None) -> list[tuple[int, int, int]]:
    """The largest rank's bytes for contexts up to the model's own, or to the configured one, and for numbers of sequences."""
    config = estimate.config
    longest = max(context or 0, config.max_seq_len)
    lengths = sorted({*(length for length in CONTEXTS if length <= longest), config.max_seq_len})
    batches = sorted({*BATCHES, config.max_batch_size})
    return [(length, batch, estimate.largest(length, batch).total) for length in lengths for batch in batches]


def _show(estimate: "MemoryEstimate", shown: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from llama_core.host_memory import available_host_bytes

    config, console = estimate.config, Console()
    console.print(
        f"{config.ckpt_dir}: {estimate.plan}, {estimate.backend} backend on {estimate.device}",
        highlight=False,
        markup=False,
    )
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
    grid = {
        (one["max_seq_len"], one["max_batch_size"]): one["rank_total"] for one in shown["by_context_and_concurrency"]
    }
    lengths, batches = sorted({length for length, _ in grid}), sorted({batch for _, batch in grid})
    table = Table(title="Memory of one rank by context (rows) and sequences at once (columns)")
    table.add_column("max_seq_len", justify="right")
    for batch in batches:
        table.add_column(str(batch), justify="right")
    for length in lengths:
        table.add_row(f"{length:,}", *(format_bytes(grid[length, batch]) for batch in batches))
    console.print(table)
    if estimate.device.type == "cpu":
        console.print(
            f"Free on this machine: {format_bytes(available_host_bytes())}. Without kv_cache_bytes the ranks give the cache "
            f"at most half of what is free after loading, and need {format_bytes(estimate.least_cache)} each for one "
            "sequence. An empty rank process takes 0.2 GB more.",
            highlight=False,
        )
