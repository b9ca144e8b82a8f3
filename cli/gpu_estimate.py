"""The part of `llama-ray estimate --gpu` beside memory: the estimated time of steps, and the cache that the GPU holds."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from llama_core.sizes import format_bytes
from llama_core.step_time.devices import Gpu
from llama_core.step_time.forecast import Forecast, cache_bytes, forecasts
from llama_core.step_time.step_time import assumptions

if TYPE_CHECKING:
    from llama_core.memory_estimate import MemoryEstimate


@dataclass(frozen=True, slots=True)
class GpuEstimate:
    """cache_bytes: of the rank that has least left; negative where the weights do not fit. cache_tokens: that it holds."""

    gpu: Gpu
    num_ranks: int
    context: int
    cache_bytes: int
    cache_tokens: int
    steps: list[Forecast]

    def as_data(self) -> dict[str, Any]:
        """Seconds and bytes, as `--json` prints them."""
        return {
            "name": self.gpu.name,
            "is_estimate": True,
            "ranks": self.num_ranks,
            "context": self.context,
            "cache_bytes": self.cache_bytes,
            "cache_tokens": self.cache_tokens,
            "steps": [
                {
                    "step": one.name,
                    "decodes": one.load.decodes,
                    "prompt_tokens": one.load.chunk,
                    "fits": one.fits,
                    "seconds": one.time.seconds,
                    "tokens_per_s": one.tokens_per_s,
                    "share_of_bandwidth": one.share_of_bandwidth,
                    **asdict(one.time),
                }
                for one in self.steps
            ],
            "assumptions": assumptions(self.gpu),
        }

    def show(self) -> None:
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table

        console = Console()
        ranks = f"{self.num_ranks} x {self.gpu.title}" if self.num_ranks > 1 else self.gpu.title
        table = Table(
            title=f"Estimated, not measured: steps on {ranks}, {self.context:,} cached tokens a decode",
            box=SIMPLE,
            pad_edge=False,
        )
        table.add_column("step", no_wrap=True)
        for column in ("ms", "tokens/s", "read", "product", "attend", "links", "rest"):
            table.add_column(column, justify="right", no_wrap=True)
        for one in self.steps:
            time = one.time
            rest = time.activations_s + time.logits_s + time.launches_s
            parts = time.products_s, time.attention_s, time.collectives_s, rest
            table.add_row(
                one.name + ("" if one.fits else " *"),
                f"{time.seconds * 1e3:.2f}",
                f"{one.tokens_per_s:,.0f}",
                f"{one.share_of_bandwidth:.0%}" if one.load.decodes and not one.load.chunk else "-",
                *(f"{part * 1e3:.2f}" for part in parts),
            )
        console.print(table)
        lines = [f"Cache: {format_bytes(self.cache_bytes)} a rank, {self.cache_tokens:,} tokens"]
        if self.cache_bytes < 0:
            lines = [f"The weights do not fit: {format_bytes(-self.cache_bytes)} too many a rank. Give more --ranks."]
        elif not all(one.fits for one in self.steps):
            lines.append("*: the cache does not hold these sequences")
        lines.append(
            "read: the bytes at the datasheet's bandwidth, of the step's time. The other columns are ms; links: collectives."
        )
        lines.append("Each time is a floor, under these assumptions:")
        for line in [*lines, *(f"- {each}" for each in assumptions(self.gpu))]:
            console.print(line, highlight=False, markup=False)


def gpu_estimate(estimate: "MemoryEstimate", gpu: Gpu, context: int) -> GpuEstimate:
    """Of the ranks that `estimate` plans, each on a GPU of its own. context: cached tokens of a decode, at most max_seq_len."""
    from llama_core.execution.dtypes import dtype_name
    from llama_core.execution.kv_cache import cache_dtype
    from llama_core.execution.memory_budget import GPU_HEADROOM
    from llama_core.execution.weight_formats.format import find_weight_format

    config, plan = estimate.config, estimate.plan
    formats = {name: find_weight_format(name).bytes_per_weight for name in (plan.dtype, *plan.formats)}
    other = max(one.weights + one.working for one in estimate.ranks)
    free = cache_bytes(gpu, GPU_HEADROOM, other)
    free = min(free, config.kv_cache_bytes) if config.kv_cache_bytes is not None else free
    tokens = max(0, free // estimate.block_bytes) * config.block_size
    seen = min(context, config.max_seq_len)
    steps = forecasts(
        estimate.model,
        estimate.num_ranks,
        gpu,
        dtype_name(estimate.dtype),
        lambda name: formats[plan.format_of(name)],
        seen,
        tokens,
        cache_itemsize=cache_dtype(config, estimate.dtype).itemsize,
    )
    return GpuEstimate(gpu, estimate.num_ranks, seen, free, tokens, steps)
