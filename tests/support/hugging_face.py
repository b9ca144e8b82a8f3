"""Small random models in Hugging Face's format: by transformers, or written directly from weights in Meta's layout."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from llama_core.files.hf.config import model_from_config
from llama_core.model.config import ModelConfig
from llama_core.model.weights import weight_specs

VOCAB_SIZE = 640
_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_IMAGES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
_IMAGES |= {"patch_size": 14}
# By name: a config.json as transformers 4 or 5 writes it.
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama2": _SHAPE | {"model_type": "llama"},
    "llama3.1": _SHAPE
    | {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3"} | _LLAMA3},
    "llama3.2": _SHAPE
    | {"model_type": "llama", "tie_word_embeddings": True}
    | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0} | _LLAMA3},
    "llama-biases": _SHAPE | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-linear": _SHAPE | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-dynamic": _SHAPE | {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "smollm2": _SHAPE
    | {"model_type": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}
    | {"rope_theta": 100000, "tie_word_embeddings": True, "is_llama_config": True, "rope_interleaved": False},
    "mistral": _SHAPE | {"model_type": "mistral", "sliding_window": 24},
    "mistral-nemo": _SHAPE
    | {"model_type": "mistral", "sliding_window": None, "head_dim": 16, "hidden_size": 80, "rope_theta": 1e6},
    "ministral": _SHAPE
    | {"model_type": "ministral", "sliding_window": 24, "head_dim": 8}
    | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "qwen2": _SHAPE | {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen2-window": _SHAPE
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "qwen2-yarn": _SHAPE
    | {"model_type": "qwen2"}
    | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "qwen3": _SHAPE
    | {"model_type": "qwen3", "head_dim": 16}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "exaone4": _SHAPE | {"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 24},
    "exaone4-1.2b": _SHAPE
    | {"model_type": "exaone4", "sliding_window": None, "num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
    | {"rope_scaling": {"rope_type": "llama3"} | _LLAMA3},
    "exaone4-no-rope": _SHAPE | {"model_type": "exaone4", "layer_types": ["full_attention"] * 3},
    "smollm3": _SHAPE | {"model_type": "smollm3", "num_hidden_layers": 5, "rope_theta": 5e6},
    "smollm3-window": _SHAPE
    | {"model_type": "smollm3", "no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 24}
    | {"attention_bias": True, "tie_word_embeddings": False},
    "granite": _SHAPE
    | {"model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.0625}
    | {"residual_multiplier": 0.22, "logits_scaling": 8.0, "tie_word_embeddings": True},
    "granite-biases": _SHAPE | {"model_type": "granite", "attention_bias": True, "logits_scaling": 0.5},
    "granite-moe": _SHAPE
    | {"model_type": "granitemoe", "embedding_multiplier": 12.0, "attention_multiplier": 0.125, "num_local_experts": 6}
    | {"residual_multiplier": 0.22, "logits_scaling": 6.0, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    "phi4-mini": _SHAPE
    | {"model_type": "phi3", "hidden_size": 128, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}
    | {"original_max_position_embeddings": 64, "sliding_window": 262_144}
    | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1, 1.1, 1.5, 3, 6.5, 11]}},
    "phi3-short": _SHAPE
    | {"model_type": "phi3", "original_max_position_embeddings": 4096, "max_position_embeddings": 16_384}
    | {"rope_scaling": {"type": "longrope", "short_factor": [1, 1.1, 1.2, 1.3], "long_factor": [2.0] * 4}},
    "phi3-mini": _SHAPE
    | {"model_type": "phi3", "max_position_embeddings": 16_384}
    | {"rope_scaling": {"type": "yarn", "short_factor": [1, 1.1, 1.2, 1.3], "long_factor": [2.0] * 4}},
    "phi4": _SHAPE | {"model_type": "phi3", "num_key_value_heads": 2, "sliding_window": None},
    "mistral-small": {
        "model_type": "mistral3",
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "pixtral"} | _IMAGES,
        "text_config": _SHAPE | {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e9},
    },
    "ministral3": {
        "model_type": "mistral3",
        "vision_config": {"model_type": "pixtral"} | _IMAGES,
        "text_config": _SHAPE
        | {"model_type": "ministral3", "head_dim": 16, "tie_word_embeddings": True}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "llama_4_scaling_beta": 0.1}
            | {"original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0}
        },
    },
    "gemma3": _SHAPE
    | {"model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 7, "sliding_window": 24}
    | {"query_pre_attn_scalar": 16, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    | {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
    "gemma3-images": {
        "model_type": "gemma3",
        "vision_config": {"model_type": "siglip_vision_model"} | _IMAGES,
        "text_config": _SHAPE
        | {"model_type": "gemma3_text", "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    },
    "olmoe": _SHAPE | {"model_type": "olmoe", "num_experts": 5, "num_experts_per_tok": 2},
    "olmo2": _SHAPE | {"model_type": "olmo2", "rope_theta": 5e5},
    "olmo3": _SHAPE
    | {"model_type": "olmo3", "num_hidden_layers": 5, "sliding_window": 24, "rope_theta": 5e5}
    | {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}},
    "glm4": _SHAPE | {"model_type": "glm4", "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1.5625e-07},
    "muse-glimmer": {
        "model_type": "muse_glimmer",
        "vision_config": {"model_type": "muse_glimmer_vision"} | _IMAGES,
        "text_config": _SHAPE
        | {"model_type": "muse_glimmer_text", "head_dim": 16, "num_key_value_heads": 2, "num_hidden_layers": 5}
        | {"sliding_window": 24, "output_multiplier": 0.2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    },
    "qwen3-moe": _SHAPE
    | {"model_type": "qwen3_moe", "head_dim": 16, "num_hidden_layers": 4, "num_experts": 7, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 48, "norm_topk_prob": True},
    "qwen3-moe-all": _SHAPE
    | {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    | {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    "qwen2-moe": _SHAPE
    | {"model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 3, "rope_theta": 1e6}
    | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 128},
    "qwen2-moe-all": _SHAPE
    | {"model_type": "qwen2_moe", "num_hidden_layers": 5, "num_experts": 5, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 80, "norm_topk_prob": True}
    | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "use_sliding_window": True, "sliding_window": 24},
    "mixtral": _SHAPE | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "llama4": {
        "model_type": "llama4",
        "vision_config": {"model_type": "llama4_vision_model", "num_channels": 1, "vision_output_dim": 16}
        | _IMAGES
        | {"projector_input_dim": 16, "projector_output_dim": 16},
        "text_config": _SHAPE
        | {"model_type": "llama4_text", "head_dim": 16, "num_hidden_layers": 5, "intermediate_size_mlp": 160}
        | {"num_local_experts": 6, "interleave_moe_layer_step": 2, "attention_chunk_size": 24, "floor_scale": 8}
        | {"rope_scaling": {"rope_type": "llama3"} | _LLAMA3 | {"high_freq_factor": 1.0}, "rope_theta": 5e5},
    },
    "llama4-scout": _SHAPE
    | {"model_type": "llama4_text", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1}
    | {"num_hidden_layers": 5, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 160, "rope_theta": 5e5}
    | {"max_position_embeddings": 131_072}
    | {
        "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0}
        | {"original_max_position_embeddings": 8192}
    },
    "llama4-moe": _SHAPE
    | {"model_type": "llama4_text", "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2}
    | {"intermediate_size_mlp": 64, "moe_layers": [0, 2], "no_rope_layers": [1, 0, 1], "use_qk_norm": False}
    | {"attention_chunk_size": 24, "attention_bias": True, "attn_temperature_tuning": False},
    "gpt-oss": _SHAPE
    | {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
    }
    | {"sliding_window": 24, "intermediate_size": 64, "rope_theta": 150000.0}
    | {
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        | {"original_max_position_embeddings": 32}
    },
    "seed-oss": _SHAPE
    | {"model_type": "seed_oss", "head_dim": 16, "rope_theta": 1e7, "rope_scaling": {"rope_type": "default"}},
    "seed-oss-biases": _SHAPE
    | {"model_type": "seed_oss", "head_dim": 8, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
}


def read(config: Mapping[str, Any], vocab_size: int = VOCAB_SIZE) -> ModelConfig:
    """The architecture that our reader makes of a config.json."""
    return model_from_config(config, vocab_size=vocab_size)


def random_weights(
    config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Weights in Meta's names and layout; a tied model's output layer is its embedding."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: (0.25 * torch.randn(spec.shape, generator=generator)).to(dtype)
        for name, spec in weight_specs(config).items()
    }
    if config.tied_embeddings:
        weights["output.weight"] = weights["tok_embeddings.weight"]
    return weights


_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "output": "lm_head",
    "layers": "model.layers",
    "norm.weight": "model.norm.weight",
    "attention.w": "self_attn.",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def in_hugging_faces_layout(weights: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Weights in Meta's layout, named and ordered as transformers stores them. Independent of the reader's code."""
    converted = {}
    for name, weight in weights.items():
        if name == "output.weight" and config.tied_embeddings:
            continue
        rotated = any(part in name for part in (".wq.", ".wk.", ".q_norm.", ".k_norm."))
        if rotated:  # as transformers' conversion script of Meta's files permutes them
            weight = weight.view(-1, config.head_dim // 2, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
        for ours, theirs in _NAMES.items():
            if name.startswith(ours) or f".{ours}" in name:
                name = name.replace(ours, theirs, 1)
        for projection in ("q", "k", "v", "o"):
            name = name.replace(f"self_attn.{projection}.", f"self_attn.{projection}_proj.")
        converted[name] = weight.contiguous().clone()
    return converted


def write(directory: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], num_files: int = 1) -> Path:
    """Write config.json and `weights` (Meta's layout) as so many safetensors files, with an index if there are several."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    stored = in_hugging_faces_layout(weights, read(config, vocab_size=1))
    write_files(directory, stored, num_files)
    return directory


def write_files(directory: Path, stored: Mapping[str, torch.Tensor], num_files: int) -> None:
    """Write tensors by the names that they have in the files."""
    if num_files == 1:
        save_file(dict(stored), directory / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    weight_map = {name: names[i % num_files] for i, name in enumerate(stored)}
    for file in names:
        save_file({name: stored[name] for name in stored if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
