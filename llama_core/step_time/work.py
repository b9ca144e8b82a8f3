"""What one rank does in a step: bytes, operations, launches and messages. From the architecture alone; no device, no torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from llama_core.checkpoint.rank_share import RankShare
from llama_core.checkpoint.weights import EMBEDDING, OUTPUT, is_linear, weight_specs
from llama_core.model_config import ModelConfig
from llama_core.step_time.attention_splits import combines_in_kernel, longest_split, split_count

# Kernels of a layer: two norms, four products, rotation, attention of decodes, combination of its splits, SwiGLU.
LAUNCHES_A_LAYER = 10
# Of a step beside its layers: tokens with their embeddings, the last norm, logits, sampling.
LAUNCHES_A_STEP = 16
# Times that greedy sampling reads or writes float32 logits.
LOGIT_PASSES = 6


@dataclass(frozen=True, slots=True)
class StepLoad:
    """decodes: rows of one token, each with `context` positions in the cache. chunk: tokens of one prompt, of which
    `chunk_start` are in the cache."""

    decodes: int
    context: int = 0
    chunk: int = 0
    chunk_start: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk

    @property
    def samples(self) -> int:
        return self.decodes + (self.chunk > 0)


@dataclass(frozen=True, slots=True)
class Matrices:
    """One kind of matrix of this rank in all layers: bytes that a step reads, and multiplications for each token."""

    num_bytes: float
    macs: int


@dataclass(frozen=True, slots=True)
class RankWork:
    """matrices: of the layers, and the output layer's. gate_up, activations, hidden: of one layer. other_bytes: norms and
    biases. cache_bytes: of one position in one layer. activations: values that a token moves between the products and into and
    out of them. hidden: of SwiGLU."""

    model: ModelConfig
    num_ranks: int
    matrices: tuple[Matrices, ...]
    output: Matrices
    gate_up: Matrices
    other_bytes: float
    cache_bytes: int
    activations: int
    n_heads: int
    n_kv_heads: int
    hidden: int

    @property
    def weight_bytes(self) -> float:
        """That every step reads: all weights but the embedding, of which it reads a row a token."""
        return sum(each.num_bytes for each in self.matrices) + self.output.num_bytes + self.other_bytes

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        num_ranks: int,
        bytes_per_weight: Callable[[str], float],
        itemsize: int,
        cache_itemsize: int | None = None,
    ) -> "RankWork":
        """Of the rank with the most work. bytes_per_weight: by the name of a weight. itemsize: of activations, and of the cache
        unless `cache_itemsize` says otherwise."""
        shares = [RankShare.of(model, rank, num_ranks) for rank in range(num_ranks)]
        share = max(shares, key=lambda one: (len(one.heads), len(one.hidden), len(one.vocab)))
        groups: dict[str, list[float]] = {}
        other = 0.0
        for name, spec in weight_specs(model).items():
            count = math.prod(spec.part(share).shape)
            if is_linear(name):
                kind = _KINDS.get(name.rpartition(".")[0].rpartition(".")[2], OUTPUT)
                sums = groups.setdefault(kind, [0.0, 0])
                sums[0] += count * bytes_per_weight(name)
                sums[1] += count
            elif name != EMBEDDING:
                other += count * itemsize
        output = groups.pop(OUTPUT)
        queries, keys = len(share.heads) * model.head_dim, len(share.kv_heads) * model.head_dim
        qkv, hidden = queries + 2 * keys, len(share.hidden)
        between = 2 * 4 * model.dim + 2 * qkv + 2 * queries + 3 * hidden
        products = (model.dim + qkv) + (queries + model.dim) + (model.dim + 2 * hidden) + (hidden + model.dim)
        return cls(
            model,
            num_ranks,
            tuple(Matrices(size, int(count)) for size, count in groups.values()),
            Matrices(output[0], int(output[1])),
            Matrices(groups["gate_up"][0] / model.n_layers, int(groups["gate_up"][1]) // model.n_layers),
            other,
            2 * keys * (cache_itemsize or itemsize),
            between + products,
            len(share.heads),
            len(share.kv_heads),
            hidden,
        )

    def seen(self, load: StepLoad) -> tuple[int, int]:
        """Positions of the cache that decodes read, in all layers together, and pairs of a chunk's token with one it sees."""
        decodes = pairs = 0
        for layer in range(self.model.n_layers):
            window = self.model.window(layer) or math.inf
            decodes += load.decodes * int(min(load.context, window))
            mean = min(load.chunk_start + (load.chunk + 1) / 2, window)
            pairs += int(load.chunk * mean)
        return decodes, pairs

    def split_bytes(self, load: StepLoad) -> int:
        """That the splits of decodes write and read again, in all layers together: float32 values and a logarithm for each
        query head. 0 where the attention kernel combines them."""
        if not load.decodes or not load.context or combines_in_kernel(load.decodes, self.n_kv_heads):
            return 0
        model = self.model
        splits = sum(split_count(load.context, model.window(layer)) for layer in range(model.n_layers))
        return load.decodes * splits * self.n_heads * (model.head_dim + 1) * 2 * 4

    def longest_split_bytes(self, load: StepLoad) -> float:
        """That the program with the longest split of a decode reads, in all layers one after another: of one key head."""
        if not load.decodes or not load.context:
            return 0
        model, longest = self.model, longest_split(load.context)
        positions = sum(min(longest, model.window(layer) or longest) for layer in range(model.n_layers))
        return positions * self.cache_bytes / self.n_kv_heads

    def chunk_positions(self, load: StepLoad) -> int:
        """Positions of the cache that the chunk's attention reads, in all layers together."""
        if not load.chunk:
            return 0
        windows = (self.model.window(layer) or math.inf for layer in range(self.model.n_layers))
        return sum(int(min(load.chunk_start + load.chunk, window + load.chunk)) for window in windows)

    def launches(self, load: StepLoad) -> int:
        """Attention of a chunk is one kernel; attention of decodes two, or one in large batches. Padding is not counted."""
        both = load.decodes > 0 and load.chunk > 0
        no_combine_kernel = not load.decodes or combines_in_kernel(load.decodes, self.n_kv_heads)
        return self.model.n_layers * (LAUNCHES_A_LAYER + both - no_combine_kernel) + LAUNCHES_A_STEP


_KINDS = {"wq": "qkv", "wk": "qkv", "wv": "qkv", "wo": "out", "w1": "gate_up", "w3": "gate_up", "w2": "down"}
