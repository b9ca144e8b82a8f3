"""Writes Meta's format: params.json and consolidated.NN.pth."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from llama_core.checkpoint.loader import Progress, rank_weights
from llama_core.checkpoint.meta_params import config_from_params
from llama_core.checkpoint.rank_share import RankShare, is_even
from llama_core.checkpoint.source import WeightReader
from llama_core.errors import ConfigError
from llama_core.model_config import ModelConfig


def params_of(model: ModelConfig, num_ids: int) -> dict[str, Any]:
    """A params.json for the model. `num_ids`: of the tokenizer. Raises ConfigError that names what the format cannot say."""
    if missing := list(_not_in_meta(model, num_ids)):
        raise ConfigError(f"Meta's format has no {', no '.join(missing)}: use the format hf")
    hidden = int(8 * model.dim / 3)
    params: dict[str, Any] = {
        "dim": model.dim,
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "n_kv_heads": model.n_kv_heads,
        "multiple_of": model.hidden_dim,  # the width is the next multiple of it
        "norm_eps": model.norm_eps,
        "vocab_size": model.vocab_size,
        "rope_theta": model.rope.theta,
    }
    if hidden > model.hidden_dim:
        params["ffn_dim_multiplier"] = model.hidden_dim / hidden
    if model.rope.kind == "llama3":
        params |= {"use_scaled_rope": True, "rope_scaling_factor": model.rope.factor}
    found = config_from_params(params, vocab_size=num_ids)
    if _comparable(found) != _comparable(model):
        raise ConfigError("Meta's format cannot describe this model's rotary embedding: use the format hf")
    return params


def _not_in_meta(model: ModelConfig, num_ids: int) -> Iterator[str]:
    if model.attention_bias or model.attention_out_bias or model.mlp_bias:
        yield "biases"
    if model.qk_norm:
        yield "norms of q and k"
    if model.windows:
        yield "sliding windows"
    if model.head_dim * model.n_heads != model.dim:
        yield "head_dim of its own"
    if model.rope.kind not in ("default", "llama3"):
        yield f"rope type {model.rope.kind}"
    if model.vocab_size != num_ids:
        yield f"vocabulary padded from {num_ids} to {model.vocab_size} ids"


def _comparable(model: ModelConfig) -> ModelConfig:
    """Without what params.json does not say: shards have an output layer of their own, and no context length."""
    return replace(model, tied_embeddings=False, context_length=None)


def write_weights(
    reader: WeightReader, model: ModelConfig, dtype: torch.dtype, folder: Path, num_shards: int, on_progress: Progress
) -> list[Path]:
    """Write `num_shards` shards, divided as Llama 2's are, one in memory at a time. Returns the files."""
    if num_shards > model.n_heads or not is_even(model, num_shards):
        raise ConfigError(f"{num_shards} shards do not divide every dimension of the model, which Meta's format needs")
    files = []
    for index in range(num_shards):
        path = folder / f"consolidated.{index:02d}.pth"
        share = RankShare.of(model, index, num_shards)

        def of_all(done: int, total: int, index: int = index) -> None:
            on_progress(index * total + done, num_shards * total)

        torch.save(dict(rank_weights(reader, model, share, dtype, torch.device("cpu"), of_all)), path)
        files.append(path)
    return files
