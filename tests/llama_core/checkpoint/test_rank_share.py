"""What each rank has of a model: every part exactly once, on any number of ranks."""

import itertools

import pytest

from llama_core.errors import ConfigError
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare
from tests.support.plain_model import decoder


def model(heads: int = 9, kv_heads: int = 3, hidden: int = 1536) -> ModelConfig:
    return decoder(
        dim=576, n_layers=2, n_heads=heads, n_kv_heads=kv_heads, head_dim=64, hidden_dim=hidden, vocab_size=49152
    ).check("test")


def shares(config: ModelConfig, world_size: int) -> list[RankShare]:
    return [RankShare.of(config, rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 8), (8, 1), (12, 4), (7, 7), (32, 8)])
def test_every_part_is_given_out_once_on_any_number_of_ranks(heads: int, kv_heads: int) -> None:
    config = model(heads, kv_heads)
    group = heads // kv_heads
    for world_size in range(1, heads + 1):
        given = shares(config, world_size)
        for name, size in (("heads", heads), ("hidden", 1536), ("vocab", 49152), ("columns", 576)):
            assert list(itertools.chain.from_iterable(getattr(share, name) for share in given)) == list(range(size)), (
                name
            )
        assert {head for share in given for head in share.kv_heads} == set(range(kv_heads))
        for share in given:
            own_group = len(share.heads) // len(share.kv_heads)
            assert own_group * len(share.kv_heads) == len(share.heads) > 0
            used = [head // group for head in share.heads]
            assert used == [share.kv_heads[i // own_group] for i in range(len(share.heads))]


@pytest.mark.parametrize("world_size", range(1, 10))
def test_parts_are_as_even_as_they_come(world_size: int) -> None:
    for share in shares(model(), world_size):
        assert abs(len(share.vocab) - 49152 / world_size) < 1 and abs(len(share.columns) - 576 / world_size) < 1
        assert abs(len(share.hidden) - 1536 / world_size) < 32
        assert len(share.hidden) % 32 == 0 or 1536 % world_size == 0
        assert abs(len(share.heads) - 9 / world_size) <= 2  # whole groups of three heads on up to three ranks


def test_more_ranks_than_query_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="model_parallel_size 10 is more than the 9 query heads"):
        RankShare.of(model(), 0, 10)
