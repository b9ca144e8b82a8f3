"""Writes a checkpoint in Meta's format as another number of shards: python -m llama_core.reshard SOURCE TARGET --shards N"""

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch

from llama_core.checkpoint.loader import rank_weights
from llama_core.checkpoint.manifest import Manifest
from llama_core.checkpoint.meta import MetaCheckpoint
from llama_core.checkpoint.rank_share import RankShare, is_even
from llama_core.errors import CheckpointError, LlamaError
from llama_core.text.registry import load_tokenizer, tokenizer_files


def reshard(source: Path, target: Path, num_shards: int, tokenizer_path: Path | None = None) -> list[Path]:
    """Write `source` to `target` as `num_shards` shards, divided as Llama 2's are, one in memory at a time. Returns the files.

    Checks SHA256SUMS in `source` first, if it exists. Keeps the dtype. Copies params.json and the tokenizer. Raises
    CheckpointError if `target` holds shards already.
    """
    tokenizer = tokenizer_files(tokenizer_path or source)
    checkpoint = MetaCheckpoint(source)
    if (manifest := Manifest.find(source)) is not None:
        manifest.check_complete(checkpoint)
        manifest.verify([*checkpoint.files, *tokenizer], os.cpu_count() or 1)
    config = checkpoint.model_config(load_tokenizer(tokenizer[0]).n_words)
    if not is_even(config, num_shards):
        raise CheckpointError(
            f"{num_shards} shards do not divide every dimension of {source}, which Meta's format needs"
        )
    reader = checkpoint.open_weights(config)
    reader.verify_checksums(0, 1)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.glob("consolidated.*.pth")):
        raise CheckpointError(f"{target}: holds shards already")
    written = []
    for index in range(num_shards):
        path = target / f"consolidated.{index:02d}.pth"
        share = RankShare.of(config, index, num_shards)
        torch.save(dict(rank_weights(reader, config, share, reader.dtype, torch.device("cpu"))), path)
        written.append(path)
    shutil.copyfile(source / "params.json", target / "params.json")
    for file in tokenizer:
        shutil.copyfile(file, target / (file.name if file.suffix == ".json" else "tokenizer.model"))
    return written


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m llama_core.reshard", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, help="default: what lies in SOURCE")
    args = parser.parse_args()
    try:
        for path in reshard(args.source, args.target, args.shards, args.tokenizer):
            print(path)
    except LlamaError as error:
        sys.exit(f"reshard: {error}")


if __name__ == "__main__":
    main()
