"""gpt-oss: experts with biases and a clamped gate, attention with sinks, windows on every second layer."""

from dataclasses import replace

from llama_core.errors import ConfigError
from llama_core.model.family import Family, Given
from llama_core.model.llama import (
    EXPERT_DOWN,
    EXPERT_FIELDS,
    EXPERT_GATE,
    EXPERT_UP,
    FFN_NORM,
    ROUTER,
    all_but_each_nth,
    expert_sizes,
    experts,
    llama_layer,
)
from llama_core.model.operations import ExpertRows, Layer, Weight

_GATE, _UP, _DOWN = (
    replace(
        weight, has_bias=True, hugging_face=f"mlp.experts.{name}_proj", rows=ExpertRows(first, step, is_turned=True)
    )
    for weight, name, first, step in (
        (EXPERT_GATE, "gate_up", 0, 2),
        (EXPERT_UP, "gate_up", 1, 2),
        (EXPERT_DOWN, "down", 0, 1),
    )
)
_ROUTER = replace(ROUTER, hugging_face="mlp.router", has_bias=True)
_SINKS = Weight("attention.sinks", "self_attn.sinks", "attn_sinks", "each_head", is_bare=True)
_FFN_NORM = replace(FFN_NORM, gguf="post_attention_norm")
_ROPE = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    **{"original_max_position_embeddings": 4096, "rope_theta": 150_000.0},
}


def _layer(given: Given, i: int) -> Layer:
    for name, served in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if (value := given.fields.number(name) or served) != served:
            raise ConfigError(f"{given.fields.source}: {name} {value} is not supported, only {served}")
    fed = experts(given.fields, router=_ROUTER, gate=_GATE, up=_UP, down=_DOWN, activation="clamped_swiglu")
    return llama_layer(given, i, fed=fed, ffn_norm=_FFN_NORM, sinks=_SINKS)


FAMILIES = (
    Family(
        "gpt_oss",
        _layer,
        {
            **{"max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True},
            **{"sliding_window": 128, "sliding_window_pattern": 2, "layer_types": None, "rope_theta": 150_000.0},
            **{"num_experts_per_tok": 4, "intermediate_size": 2880, "rms_norm_eps": 1e-5, "rope_parameters": _ROPE},
        },
        is_sliding=all_but_each_nth,
        optional_bias=("attention_bias",),
        reads=EXPERT_FIELDS | {"intermediate_size": "expert_feed_forward_length"},
        model=expert_sizes(128, "intermediate_size"),
        gguf="gpt-oss",
        gguf_has_experts=True,
        gguf_is_neox=True,
    ),
)
