"""The weights of the architecture: names, full shapes, and how ranks divide them. Independent of any file format."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from llama_core.model_config import ModelConfig


class Box(NamedTuple):
    """A region of a weight: for each dimension, indices in [start, start + shape)."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Full shape of a weight, and the dimension along which ranks divide it (None: every rank has all of it)."""

    shape: tuple[int, ...]
    rank_dim: int | None

    def part(self, rank: int, world_size: int) -> Box:
        """The region that `rank` of `world_size` ranks loads. `world_size` divides the dimension."""
        shape = equal_part(self.shape, self.rank_dim, world_size)
        return Box(tuple(rank * size if dim == self.rank_dim else 0 for dim, size in enumerate(shape)), shape)


def equal_part(shape: tuple[int, ...], dim: int | None, count: int) -> tuple[int, ...]:
    """`shape` divided into `count` equal parts along `dim`."""
    return tuple(size // count if d == dim else size for d, size in enumerate(shape))


def weight_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """Every weight of the architecture in the model's order, by the name that Meta's checkpoints give it."""
    dim, hidden, kv_dim = config.dim, config.hidden_dim, config.n_kv_heads * config.head_dim
    by_rows, by_columns = 0, 1
    specs = {"tok_embeddings.weight": WeightSpec((config.vocab_size, dim), by_columns)}
    for i in range(config.n_layers):
        prefix = f"layers.{i}."
        for name, shape, rank_dim in (
            ("attention.wq", (dim, dim), by_rows),
            ("attention.wk", (kv_dim, dim), by_rows),
            ("attention.wv", (kv_dim, dim), by_rows),
            ("attention.wo", (dim, dim), by_columns),
            ("feed_forward.w1", (hidden, dim), by_rows),
            ("feed_forward.w2", (dim, hidden), by_columns),
            ("feed_forward.w3", (hidden, dim), by_rows),
        ):
            specs[f"{prefix}{name}.weight"] = WeightSpec(shape, rank_dim)
        specs[f"{prefix}attention_norm.weight"] = WeightSpec((dim,), None)
        specs[f"{prefix}ffn_norm.weight"] = WeightSpec((dim,), None)
    specs["norm.weight"] = WeightSpec((dim,), None)
    specs["output.weight"] = WeightSpec((config.vocab_size, dim), by_rows)
    return specs


def is_linear(name: str) -> bool:
    """Whether the weight is the matrix of a linear layer, not an embedding or the factors of a norm."""
    return name != "tok_embeddings.weight" and not name.endswith("norm.weight")


def num_values(config: ModelConfig, rank: int, world_size: int) -> int:
    """Values in all weights that `rank` of `world_size` ranks loads."""
    return sum(math.prod(spec.part(rank, world_size).shape) for spec in weight_specs(config).values())
