"""Writes config.json of Hugging Face's format. `safetensors_writer` writes the weights."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final

import torch

from llama_core.checkpoint.hf_config import model_from_config
from llama_core.errors import ConfigError
from llama_core.model_config import FULL_ATTENTION, ModelConfig

_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_UNKNOWN_CONTEXT = 2048  # transformers' default for Llama


def config_of(model: ModelConfig, dtype: torch.dtype, stop_ids: Collection[int], bos_id: int | None) -> dict[str, Any]:
    """A config.json that transformers 4 and 5 read. Raises ConfigError if no model_type describes the model."""
    for model_type in _ARCHITECTURES:
        config = _config(model, model_type) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        config |= {"bos_token_id": bos_id, "eos_token_id": sorted(stop_ids) or None}
        try:
            found = model_from_config(config, vocab_size=1)
        except ConfigError:
            continue  # this model_type has no such field
        if _without_context(found) == _without_context(model):  # max_position_embeddings cannot say every context
            return config
    raise ConfigError("no model_type of Hugging Face's format has this model's biases, norms and windows together")


def _config(model: ModelConfig, model_type: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": model.dim,
        "intermediate_size": model.hidden_dim,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": _positions(model),
        "rope_theta": model.rope.theta,
        "rope_scaling": _rope_scaling(model),
        "tie_word_embeddings": model.tied_embeddings,
    }
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = model.attention_bias
    if model_type == "llama":
        config["mlp_bias"] = model.mlp_bias
    else:
        config |= _windows(model, model_type)
    return config


def _windows(model: ModelConfig, model_type: str) -> dict[str, Any]:
    window = max(model.windows, default=FULL_ATTENTION) or None
    fields: dict[str, Any] = {"sliding_window": window}
    if model_type.startswith("qwen"):
        fields["use_sliding_window"] = window is not None
    if model_type != "mistral":
        kinds = (model.window(layer) for layer in range(model.n_layers))
        fields["layer_types"] = ["full_attention" if kind == FULL_ATTENTION else "sliding_attention" for kind in kinds]
    return fields


def _positions(model: ModelConfig) -> int:
    """max_position_embeddings, which the kinds linear and dynamic stretch by their factor."""
    context = model.context_length or _UNKNOWN_CONTEXT
    if model.rope.kind == "dynamic":
        assert model.rope.original_context is not None
        return model.rope.original_context
    return round(context / model.rope.factor) if model.rope.kind == "linear" else context


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    rope = model.rope
    if rope.kind == "default":
        return None
    fields: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        fields |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        fields["attention_factor"] = rope.attention_factor
    return fields


def _without_context(model: ModelConfig) -> ModelConfig:
    return replace(model, context_length=None)
