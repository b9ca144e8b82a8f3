"""Reads the architecture from Meta's params.json: Llama 1 to 3.3 and Code Llama."""

import math
from pathlib import Path
from typing import Any

from llama_core.errors import ConfigError
from llama_core.files.json_fields import read_object
from llama_core.model.config import MAX_LAYERS, MAX_SIZE, ModelConfig
from llama_core.model.family import Given
from llama_core.model.fields import Fields, shown
from llama_core.model.llama import llama_layer
from llama_core.model.operations import FULL_ATTENTION
from llama_core.model.rope import RopeConfig

_FIELDS = frozenset(
    {
        *("dim", "n_layers", "n_heads", "vocab_size", "n_kv_heads", "multiple_of", "ffn_dim_multiplier", "norm_eps"),
        *("rope_theta", "use_scaled_rope", "rope_scaling_factor"),
    }
)
# Some releases of Meta's checkpoints contain these fields; they do not change the model.
_IGNORED_FIELDS = frozenset({"max_batch_size", "max_seq_len", "model_parallel_size", "dtype"})

# Llama 3.1's scaled rotary embedding, which params.json names but does not describe. Llama 3.2's models have the dims below
# and stretch the context by 32 instead of 8 (config.json of both releases).
_SCALED_ROPE_FACTOR = 8.0
_SCALED_ROPE_FACTOR_3_2 = 32.0
_DIMS_3_2 = (2048, 3072)
_TRAINED_CONTEXT = 8192
_SCALED_CONTEXT = 131_072


def config_from_params(params: dict[str, Any], *, vocab_size: int, source: str = "params.json") -> ModelConfig:
    """The fields of params.json. `vocab_size` is the tokenizer's, which counts where params.json says -1.

    Raises ConfigError that names the field.
    """
    given = Fields({key: value for key, value in params.items() if key not in _IGNORED_FIELDS}, source)
    for key in given.given:
        if key not in _FIELDS:
            raise ConfigError(f"{source}: unknown field {shown(key)}")
    if given.given.get("vocab_size", -1) != -1 and (declared := given.integer("vocab_size")) != vocab_size:
        raise ConfigError(
            f"{source}: vocab_size is {declared}, but the tokenizer has {vocab_size} tokens: "
            "tokenizer and checkpoint belong to different models"
        )
    n_heads = given.integer("n_heads")
    dim = given.integer("dim")
    if dim % n_heads:
        raise ConfigError(f"{source}: dim {dim} is not divisible by n_heads {n_heads}")
    rope, context = _rope(given, dim)
    return ModelConfig(
        dim=dim,
        n_heads=n_heads,
        n_kv_heads=given.integer("n_kv_heads", n_heads),
        head_dim=dim // n_heads,
        hidden_dim=_hidden_dim(given, dim, source),
        vocab_size=vocab_size,
        layers=(llama_layer(Given(rope, (FULL_ATTENTION,)), 0),) * given.integer("n_layers", most=MAX_LAYERS),
        norm_eps=given.number("norm_eps") or 1e-5,
        context_length=context,
    ).check(source)


def _hidden_dim(given: Fields, dim: int, source: str) -> int:
    """Width of the feed-forward layer: multiple_of * ceil(int(ffn_dim_multiplier * int(2 * 4 * dim / 3)) / multiple_of)."""
    multiple_of, multiplier = given.integer("multiple_of", 256), given.number("ffn_dim_multiplier")
    if 1 <= (multiplier or 1.0) * dim * 8 / 3 <= MAX_SIZE:
        hidden = int(2 * 4 * dim / 3)
        if multiplier is not None:
            hidden = int(multiplier * hidden)
        width = multiple_of * math.ceil(hidden / multiple_of)
        if 1 <= width < MAX_SIZE:
            return width
    raise ConfigError(
        f"{source}: ffn_dim_multiplier, dim and multiple_of make a feed-forward width that is not from 1 to {MAX_SIZE}"
    )


def _rope(given: Fields, dim: int) -> tuple[RopeConfig, int | None]:
    """The rotary embedding, and the context length where the release can be told from it: params.json does not have it."""
    theta = given.number("rope_theta") or 10000.0
    if given.flag("use_scaled_rope"):
        release = _SCALED_ROPE_FACTOR_3_2 if dim in _DIMS_3_2 else _SCALED_ROPE_FACTOR
        factor = given.number("rope_scaling_factor") or release
        scaled = RopeConfig("llama3", theta, factor, original_context=_TRAINED_CONTEXT)
        return scaled, _SCALED_CONTEXT
    known_contexts = {500_000.0: _TRAINED_CONTEXT, 1_000_000.0: 16_384}  # Llama 3, Code Llama
    return RopeConfig(theta=theta), known_contexts.get(theta)


def may_be_tied(config: ModelConfig) -> bool:
    """Whether the model is of a release whose output layer has the embedding's weights, and whose files may leave it out:
    Llama 3.2 with 1 or 3 billion weights."""
    return config.rope.kind == "llama3" and config.dim in _DIMS_3_2


def read_params(ckpt_dir: str | Path, *, vocab_size: int) -> ModelConfig:
    """Read and validate `ckpt_dir`/params.json. Raises ConfigError that names the file and the field."""
    path = Path(ckpt_dir) / "params.json"
    return config_from_params(read_object(path), vocab_size=vocab_size, source=str(path))
