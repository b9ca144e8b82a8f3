"""The weights of the architecture: names, full shapes, and how ranks divide them. Independent of any file format."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llama_core.files.rank_share import RankShare
from llama_core.model_config import ModelConfig

EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"

# What a dimension of a weight consists of; names of RankShare's ranges.
Division = Literal["heads", "kv_heads", "hidden", "vocab", "columns"]


class Box(NamedTuple):
    """A region of a weight: for each dimension, indices in [start, start + shape)."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Full shape of a weight, and the dimension along which ranks divide it (None: every rank has all of it).

    division: of what that dimension consists. unit: indices of the dimension for each of them.
    """

    shape: tuple[int, ...]
    rank_dim: int | None = None
    division: Division = "columns"
    unit: int = 1

    def part(self, share: RankShare) -> Box:
        """The region that a rank loads."""
        start, shape = [0] * len(self.shape), list(self.shape)
        if self.rank_dim is not None:
            own: range = getattr(share, self.division)
            start[self.rank_dim], shape[self.rank_dim] = own.start * self.unit, len(own) * self.unit
        return Box(tuple(start), tuple(shape))


def equal_part(shape: tuple[int, ...], dim: int | None, count: int) -> tuple[int, ...]:
    """`shape` divided into `count` equal parts along `dim`."""
    return tuple(size // count if d == dim else size for d, size in enumerate(shape))


def weight_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """Every weight of the architecture in the model's order, by the name that Meta's checkpoints give it.

    Biases and the norms of q and k, which Meta's models do not have, are named after their projections. A tied model has
    OUTPUT too: readers give it the embedding's values.
    """
    dim = config.dim
    specs = {EMBEDDING: WeightSpec((config.vocab_size, dim), 1, "columns")}
    for i in range(config.n_layers):
        specs |= {f"layers.{i}.{name}": spec for name, spec in _layer_specs(config).items()}
    specs["norm.weight"] = WeightSpec((dim,))
    specs[OUTPUT] = WeightSpec((config.vocab_size, dim), 0, "vocab")
    return specs


def _layer_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    dim, hidden, head = config.dim, config.hidden_dim, config.head_dim
    queries, keys = config.query_width, config.kv_width
    specs = {
        "attention.wq.weight": WeightSpec((queries, dim), 0, "heads", head),
        "attention.wk.weight": WeightSpec((keys, dim), 0, "kv_heads", head),
        "attention.wv.weight": WeightSpec((keys, dim), 0, "kv_heads", head),
        "attention.wo.weight": WeightSpec((dim, queries), 1, "heads", head),
        "feed_forward.w1.weight": WeightSpec((hidden, dim), 0, "hidden"),
        "feed_forward.w2.weight": WeightSpec((dim, hidden), 1, "hidden"),
        "feed_forward.w3.weight": WeightSpec((hidden, dim), 0, "hidden"),
        "attention_norm.weight": WeightSpec((dim,)),
        "ffn_norm.weight": WeightSpec((dim,)),
    }
    if config.attention_bias:
        specs["attention.wq.bias"] = WeightSpec((queries,), 0, "heads", head)
        specs["attention.wk.bias"] = WeightSpec((keys,), 0, "kv_heads", head)
        specs["attention.wv.bias"] = WeightSpec((keys,), 0, "kv_heads", head)
    if config.attention_out_bias:
        specs["attention.wo.bias"] = WeightSpec((dim,))
    if config.mlp_bias:
        specs["feed_forward.w1.bias"] = WeightSpec((hidden,), 0, "hidden")
        specs["feed_forward.w2.bias"] = WeightSpec((dim,))
        specs["feed_forward.w3.bias"] = WeightSpec((hidden,), 0, "hidden")
    if config.qk_norm:
        specs["attention.q_norm.weight"] = WeightSpec((head,))
        specs["attention.k_norm.weight"] = WeightSpec((head,))
    return specs


def is_linear(name: str) -> bool:
    """Whether the weight is the matrix of a linear layer, not an embedding, a bias or the factors of a norm."""
    return name != EMBEDDING and name.endswith(".weight") and not name.endswith("norm.weight")


def num_values(config: ModelConfig, share: RankShare) -> int:
    """Values in all weights that a rank loads."""
    return sum(math.prod(spec.part(share).shape) for spec in weight_specs(config).values())
