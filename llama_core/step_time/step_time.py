"""The time of a step on a GPU, as the sum of its parts: a floor, because nothing waits in it that need not.

Each product takes as long as reading its weights or as its operations, whichever is more; kernels run one after another.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from llama_core.step_time.attention_splits import SPLIT_BITS, SPLIT_UNIT
from llama_core.step_time.devices import BANDWIDTH_SHARE, LAUNCH_S, LINK_SHARE, Gpu, Link
from llama_core.step_time.fused_products import MOST_ROWS, swiglu_bytes
from llama_core.step_time.work import LOGIT_PASSES, Matrices, RankWork, StepLoad

# Of an all-reduce with NCCL's LL protocol, before the first step of its ring (src/graph/tuning.cc).
COLLECTIVE_S: Final = 6.6e-6
# Of the rate of products, what attention to a prompt reaches: FlashAttention-2 on an A100, 0.5 to 0.7 of the peak.
ATTENTION_SHARE: Final = 0.6
OMITTED: Final = (
    "the host's time, while the GPU has a step in its queue",
    "the part of a wave or tile that is not full, and the ramps of each kernel",
    "a product of few rows that reads slower than a copy: published engines reach 0.7 to 0.8 of this model's speed at batch 1",
    "clocks that fall under the power limit, other work of the GPU, and ranks on other nodes",
)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds. read_s: reading the step's weights and cache at the datasheet's bandwidth, which no engine beats."""

    products_s: float
    attention_s: float
    activations_s: float
    logits_s: float
    collectives_s: float
    launches_s: float
    read_s: float

    @property
    def seconds(self) -> float:
        parts = self.products_s, self.attention_s, self.activations_s, self.logits_s
        return sum(parts) + self.collectives_s + self.launches_s


def step_time(work: RankWork, load: StepLoad, gpu: Gpu, dtype: str) -> StepTime:
    """dtype: of activations. Quantized weights are expanded to it inside the product."""
    model, itemsize = work.model, 4 if dtype == "float32" else 2
    rate, read = gpu.product_rate(dtype), gpu.read_rate

    def product(matrices: Matrices, rows: int) -> float:
        return max(matrices.num_bytes / read, 2 * matrices.macs * rows / rate)

    positions, pairs = work.seen(load)
    operations = 4 * work.n_heads * model.head_dim
    attention_rate = gpu.product_rate(dtype) * ATTENTION_SHARE
    chunk_bytes = work.chunk_positions(load) * work.cache_bytes
    logit_bytes = LOGIT_PASSES * 4 * model.vocab_size * load.samples
    sums, gathers = 2 * model.n_layers, 2
    swiglu = _fused_swiglu(work, load, itemsize)
    return StepTime(
        products_s=sum(product(each, load.tokens) for each in work.matrices)
        + product(work.output, load.samples)
        + work.other_bytes / read,
        attention_s=max(
            (positions * work.cache_bytes + work.split_bytes(load)) / read,
            operations * positions / attention_rate,
            work.longest_split_bytes(load) * gpu.multiprocessors / read,
        )
        + max(chunk_bytes / read, operations * pairs / attention_rate),
        activations_s=load.tokens * model.n_layers * work.activations * itemsize / read - swiglu.saved_bytes / read,
        logits_s=logit_bytes / read,
        collectives_s=sums * all_reduce_s(load.tokens * model.dim * itemsize, work.num_ranks, gpu.link)
        + gathers * all_reduce_s(0, work.num_ranks, gpu.link),
        launches_s=(work.launches(load) - swiglu.saved_launches) * LAUNCH_S,
        read_s=(work.weight_bytes + positions * work.cache_bytes + chunk_bytes) / gpu.bandwidth,
    )


class _FusedSwiglu(NamedTuple):
    """What SwiGLU in the epilogue of its product changes in a step."""

    saved_launches: int = 0
    saved_bytes: int = 0


def _fused_swiglu(work: RankWork, load: StepLoad, itemsize: int) -> _FusedSwiglu:
    """As the engine chooses it. The sum of a residual in an epilogue saves no launch, and is not counted."""
    if load.tokens > MOST_ROWS or itemsize == 4:
        return _FusedSwiglu()
    layers = work.model.n_layers
    return _FusedSwiglu(layers, layers * swiglu_bytes(load.tokens, work.hidden, itemsize))


def all_reduce_s(num_bytes: int, num_ranks: int, link: Link) -> float:
    """NCCL's ring over the GPUs of one node."""
    if num_ranks == 1:
        return 0.0
    hops = 2 * (num_ranks - 1)
    return COLLECTIVE_S + hops * link.hop_s + hops / num_ranks * num_bytes / (link.bandwidth * LINK_SHARE)


def assumptions(gpu: Gpu) -> list[str]:
    """What the figures rest on, for people."""
    return [
        f"{gpu.title}: {gpu.bandwidth / 1e9:,.0f} GB/s, {gpu.products['bfloat16'] / 1e12:,.0f} TFLOP/s bfloat16, "
        f"{gpu.link.name} ({gpu.source})",
        f"reads reach {BANDWIDTH_SHARE:.0%} of the bandwidth, large products {gpu.product_share:.0%} of the peak, attention "
        f"{ATTENTION_SHARE:.0%} of that, all-reduces {LINK_SHARE:.0%} of the link",
        f"products of up to {MOST_ROWS} rows have SwiGLU in their epilogue, and read weights as fast as the library's",
        f"attention of decodes is split over programs, {SPLIT_UNIT} positions and a key head each, or more from "
        f"{2 ** (SPLIT_BITS + 1) * SPLIT_UNIT:,} positions on; none reads faster than its share of the bandwidth on one of "
        f"{gpu.multiprocessors} multiprocessors",
        f"{LAUNCH_S * 1e6:g} us between two kernels of a graph; an all-reduce takes {COLLECTIVE_S * 1e6:g} us and "
        f"{gpu.link.hop_s * 1e6:g} us for each of 2 (ranks - 1) steps before its bytes (NCCL's tuning table)",
        *(f"left out: {what}" for what in OMITTED),
    ]
