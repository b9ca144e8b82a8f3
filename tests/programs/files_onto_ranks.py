"""Loads models stored in N files on M ranks, for every N and M, in Hugging Face's format and Meta's, and compares each rank's
weights with the whole model's: python -m tests.programs.files_onto_ranks
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from llama_core.checkpoint.registry import open_checkpoint
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare
from llama_core.model.weights import weight_specs
from tests.support import checkpoints, hugging_face
from tests.support.hugging_face import CONFIGS
from tests.support.rank_weights import rank_weights

COUNTS = (1, 2, 3, 4, 8)
VOCAB_SIZE = 640
# 24 heads over 24 key/value heads: every count divides them, as Meta's shards must be equal.
META = {"dim": 96, "n_layers": 2, "n_heads": 24, "multiple_of": 48, "norm_eps": 1e-5, "vocab_size": -1}
META_VOCAB_SIZE = 648


def whole_models(directory: Path, names: Sequence[str], counts: Sequence[int]) -> Iterator[tuple[str, int, Path, int]]:
    """(name, number of files, folder, ids of the tokenizer) of every model that is written."""
    for name in names:
        weights = hugging_face.random_weights(hugging_face.read(CONFIGS[name]))
        for count in counts:
            yield (
                name,
                count,
                hugging_face.write(directory / f"{name}-{count}", CONFIGS[name], weights, count),
                VOCAB_SIZE,
            )
    weights = checkpoints.random_weights(META, vocab_size=META_VOCAB_SIZE)
    for count in counts:
        for dim, cut in ((1, "columns"), (0, "rows")):
            folder = directory / f"meta-{count}-{cut}"
            shards = checkpoints.split(weights, count, embedding_dim=dim)
            yield f"meta, embedding by {cut}", count, checkpoints.write(folder, shards, META), META_VOCAB_SIZE


def differences(folder: Path, vocab_size: int, counts: Sequence[int]) -> list[str]:
    """What differs between the weights of each rank of each group and the same part of the weights of one rank alone."""
    source = open_checkpoint(folder)
    config = source.model_config(vocab_size)
    whole = _load(folder, config, 0, 1)
    found = []
    for world_size in counts:
        for rank in range(world_size):
            share = RankShare.of(config, rank, world_size)
            got = _load(folder, config, rank, world_size)
            for name, spec in weight_specs(config).items():
                box = spec.part(share)
                region = tuple(slice(b, b + n) for b, n in zip(box.start, box.shape, strict=True))
                if not torch.equal(got[name], whole[name][region]):
                    found.append(f"{name} of rank {rank} of {world_size}")
    return found


def _load(folder: Path, config: ModelConfig, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    reader = open_checkpoint(folder).open_weights(config)
    share = RankShare.of(config, rank, world_size)
    return dict(rank_weights(reader, config, share, torch.float32))


def run(names: Sequence[str] = tuple(CONFIGS), counts: Sequence[int] = COUNTS) -> int:
    """Print a line for each model and number of files. Returns the number of differences."""
    total = 0
    with tempfile.TemporaryDirectory() as directory:
        for name, count, folder, vocab_size in whole_models(Path(directory), names, counts):
            found = differences(folder, vocab_size, counts)
            total += len(found)
            print(f"{name}: {count} files on {', '.join(map(str, counts))} ranks: {'; '.join(found[:3]) or 'equal'}")
    return total


if __name__ == "__main__":
    sys.exit(1 if run() else 0)
