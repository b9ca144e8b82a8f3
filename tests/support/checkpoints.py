"""Writes small random checkpoints of any shape and number of shards, and loads them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from llama_core.checkpoint.registry import open_checkpoint
from llama_core.files.meta_params import config_from_params
from llama_core.model.share import RankShare
from llama_core.model.weights import weight_specs
from llama_core.weights.loader import Progress
from tests.conftest import GOLDEN
from tests.support.forking import run_with_torch
from tests.support.rank_weights import rank_weights

# 8 heads and 4 key/value heads: 1, 2 and 4 ranks divide them.
WIDE = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "multiple_of": 32, "norm_eps": 1e-5, "vocab_size": -1}


def random_weights(
    params: dict[str, Any],
    *,
    vocab_size: int = 640,
    scale: float = 0.25,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """scale: of matrices. By default the next token depends on the previous ones."""
    generator = torch.Generator().manual_seed(seed)
    config = config_from_params(params, vocab_size=vocab_size)
    weights = {}
    for name, spec in weight_specs(config).items():
        values = torch.randn(spec.shape, generator=generator)
        weights[name] = (1 + 0.1 * values if len(spec.shape) == 1 else scale * values).to(dtype)
    return weights


def split(
    weights: dict[str, torch.Tensor], num_shards: int, *, embedding_dim: int = 1
) -> list[dict[str, torch.Tensor]]:
    """Divide weights as Meta does: as for Llama 2, or for Llama 3 with embedding_dim=0. Independent of the loader's code."""
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(num_shards)]
    for name, weight in weights.items():
        if "norm" in name:
            parts = [weight] * num_shards
        elif "tok_embeddings" in name:
            parts = list(weight.chunk(num_shards, dim=embedding_dim))
        else:
            parts = list(weight.chunk(num_shards, dim=1 if ".wo." in name or ".w2." in name else 0))
        for shard, part in zip(shards, parts, strict=True):
            shard[name] = part.clone()
    return shards


def write(
    directory: Path, shards: list[dict[str, torch.Tensor]], params: dict[str, Any] = WIDE, tokenizer: bool = True
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for i, shard in enumerate(shards):
        torch.save(shard, directory / f"consolidated.{i:02d}.pth")
    (directory / "params.json").write_text(json.dumps(params))
    if tokenizer:
        shutil.copyfile(GOLDEN / "mp1" / "tokenizer.model", directory / "tokenizer.model")
    return directory


def load(
    path: Path, vocab_size: int = 640, on_progress: Progress = lambda done, total: None
) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint of any format in float32, with its checksums verified."""
    checkpoint = open_checkpoint(path)
    checkpoint.num_shards()
    config = checkpoint.model_config(vocab_size)
    reader = checkpoint.open_weights(config)
    reader.verify_checksums(0, 1)
    return dict(rank_weights(reader, config, RankShare.of(config, 0, 1), torch.float32, on_progress))


_PEAK = """
import os, sys, torch
from tests.support.rank_weights import rank_weights
from llama_core.model.share import RankShare
from llama_core.checkpoint.registry import open_checkpoint
torch.set_num_threads(1)
torch.stack(torch.aminmax(torch.zeros(9, 9, dtype=torch.bfloat16)[:, :5])).isfinite().all()
checkpoint = open_checkpoint(sys.argv[1])
config = checkpoint.model_config(640)
rank, world_size = int(sys.argv[2]), int(sys.argv[3])
reader = checkpoint.open_weights(config)
open("/proc/self/clear_refs", "w").write("5")  # resets VmHWM to the memory that is resident now
def peak(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))
before = peak("VmRSS")
weights = dict(rank_weights(reader, config, RankShare.of(config, rank, world_size), torch.bfloat16))
print((peak("VmHWM") - before) / sum(w.nbytes for w in weights.values()))
"""


def peak_ratio(directory: Path, rank: int, world_size: int) -> float:
    """The peak memory of a process while it loads a rank's bfloat16 weights, as a multiple of their bytes."""
    done = run_with_torch(_PEAK, str(directory), str(rank), str(world_size))
    assert done.returncode == 0, done.stderr
    return float(done.stdout)
