"""Random checkpoints: both formats hold the same weights, and any number of shards the same model."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.harness.make_checkpoint import main
from llama_core import Llama
from tests.conftest import GOLDEN

TOKENIZER = GOLDEN / "mp1" / "tokenizer.model"


def made(out: Path, *arguments: str) -> Path:
    main(["tiny", "--tokenizer", str(TOKENIZER), "--out", str(out), *arguments])
    return out / "tiny"


def generated(directory: Path) -> list[list[int]]:
    llama = Llama.build(directory, directory / "tokenizer.model", 32, 2, device="cpu", dtype="float32")
    return llama.generate([[1, 5, 9, 30]], 8, temperature=0.0)[0]


def test_one_shard_and_two_hold_the_same_weights_for_the_same_seed(tmp_path: Path) -> None:
    one = generated(made(tmp_path / "one") / "meta")
    assert one == generated(made(tmp_path / "two", "--shards", "2") / "meta")
    assert one != generated(made(tmp_path / "other", "--seed", "1") / "meta")


def test_the_hugging_face_format_has_the_same_weights_with_reordered_queries_and_keys(tmp_path: Path) -> None:
    directory = made(tmp_path, "--format", "meta", "hf")
    meta = torch.load(directory / "meta" / "consolidated.00.pth", weights_only=True)
    weights = load_file(directory / "hf" / "model.safetensors")
    assert len(weights) == len(meta)
    assert torch.equal(weights["model.embed_tokens.weight"], meta["tok_embeddings.weight"])
    assert torch.equal(weights["model.layers.1.mlp.down_proj.weight"], meta["layers.1.feed_forward.w2.weight"])
    # Heads of 16: rows 0, 2, 4, ... of a head come before rows 1, 3, 5, ...
    theirs, ours = weights["model.layers.0.self_attn.k_proj.weight"], meta["layers.0.attention.wk.weight"]
    assert torch.equal(theirs[:8], ours[0:16:2])
    assert torch.equal(theirs[8:16], ours[1:16:2])
    assert torch.equal(theirs[16:24], ours[16:32:2])
