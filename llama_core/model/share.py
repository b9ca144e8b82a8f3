"""What each rank has of a model, for any number of ranks from 1 to the number of query heads. Pure; no torch.

Parts are as even as they come. Where the number of ranks divides every dimension, all ranks have equal parts.
"""

from dataclasses import dataclass
from typing import Final

from llama_core.model.config import HIDDEN_UNIT, ModelConfig

SAMPLING_RANK: Final = 0  # samples for all ranks: they may differ in the last bit of a logit


@dataclass(frozen=True, slots=True)
class RankShare:
    """The parts of one rank: layers, and of each layer query heads, the key/value heads that they use and hidden units of the
    feed-forward layer, of each expert and of a shared one; rows of the output layer, and columns of the embedding.

    With more ranks than key/value heads, several ranks have a copy of the same key/value head. On each rank,
    len(kv_heads) divides len(heads), and consecutive query heads share a key/value head.
    """

    rank: int
    world_size: int
    layers: range
    heads: range
    kv_heads: range
    hidden: range
    expert_hidden: range
    shared_hidden: range
    vocab: range
    columns: range

    @classmethod
    def of(cls, model: ModelConfig, rank: int, world_size: int) -> "RankShare":
        """The share of `rank` of `world_size` ranks. Raises ConfigError for more ranks than query heads."""
        model.check_world_size(world_size)
        heads, kv_heads = _heads(model, rank, world_size)
        return cls(
            rank=rank,
            world_size=world_size,
            layers=range(model.n_layers),
            heads=heads,
            kv_heads=kv_heads,
            hidden=_hidden_part(model.hidden_dim, rank, world_size),
            expert_hidden=_hidden_part(model.expert_dim, rank, world_size),
            shared_hidden=_hidden_part(model.shared_dim, rank, world_size),
            vocab=even_part(model.vocab_size, rank, world_size),
            columns=even_part(model.dim, rank, world_size),
        )

    @property
    def each_head(self) -> range:
        """The query heads, of which a weight has a number each."""
        return self.heads

    def has_first_copies(self, model: ModelConfig) -> bool:
        """Whether no rank before has a copy of this rank's key/value heads."""
        return self.heads.start == self.kv_heads.start * (model.n_heads // model.n_kv_heads)

    def describe(self, model: ModelConfig) -> str:
        """A phrase such as "5 of 9 heads, 2 of 3 kv heads, 832 of 1,536 hidden units, 24,576 of 49,152 vocabulary rows"."""
        parts = (
            (self.heads, model.n_heads, "heads"),
            (self.kv_heads, model.n_kv_heads, "kv heads"),
            (self.hidden, model.hidden_dim, "hidden units"),
            (self.vocab, model.vocab_size, "vocabulary rows"),
        )
        return ", ".join(f"{len(part):,} of {size:,} {name}" for part, size, name in parts)


def even_part(size: int, rank: int, world_size: int) -> range:
    """The part of `rank` when `size` things are given out to `world_size` ranks as evenly as they come."""
    return range(size * rank // world_size, size * (rank + 1) // world_size)


def _hidden_part(size: int, rank: int, world_size: int) -> range:
    has_units = size % HIDDEN_UNIT == 0 and size // HIDDEN_UNIT >= world_size
    unit = HIDDEN_UNIT if has_units and size % world_size else 1
    units = even_part(size // unit, rank, world_size)
    return range(units.start * unit, units.stop * unit)


def is_even(model: ModelConfig, world_size: int) -> bool:
    """Whether all ranks have equal parts of every dimension, and no key/value head is copied."""
    sizes = (model.n_kv_heads, model.hidden_dim, model.expert_dim, model.shared_dim, model.vocab_size, model.dim)
    return not any(size % world_size for size in sizes)


def _heads(model: ModelConfig, rank: int, world_size: int) -> tuple[range, range]:
    group = model.n_heads // model.n_kv_heads
    if world_size <= model.n_kv_heads:
        kv_heads = even_part(model.n_kv_heads, rank, world_size)
        return range(kv_heads.start * group, kv_heads.stop * group), kv_heads
    # The ranks are given out to the key/value heads, and the queries of a head to its ranks.
    head = next(h for h in range(model.n_kv_heads) if rank in even_part(world_size, h, model.n_kv_heads))
    ranks = even_part(world_size, head, model.n_kv_heads)
    queries = even_part(group, rank - ranks.start, len(ranks))
    return range(head * group + queries.start, head * group + queries.stop), range(head, head + 1)
