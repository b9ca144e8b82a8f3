"""Llama 4, its text model: layers with chunks of attention, rotated and normed by head without factors, between others whose
queries have a temperature; experts whose inputs the router scales, and beside them one that all tokens share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llama_core.model import llama
from llama_core.model.family import Family, Given
from llama_core.model.fields import Fields
from llama_core.model.operations import Add, ExpertRows, Layer, Temperature

_QKV = replace(llama.Q, is_rotated=False), replace(llama.K, is_rotated=False), llama.V  # rows lie in Meta's order
_ROUTER = replace(llama.ROUTER, hugging_face="feed_forward.router")
_GATE, _UP, _DOWN = (
    replace(
        weight,
        hugging_face=f"feed_forward.experts.{name}_proj",
        rows=rows,
        alone=weight.hugging_face.replace("mlp", "feed_forward"),
    )
    for weight, name, rows in (
        (llama.EXPERT_GATE, "gate_up", ExpertRows(0, 2, is_turned=True, in_blocks=True)),
        (llama.EXPERT_UP, "gate_up", ExpertRows(1, 2, is_turned=True, in_blocks=True)),
        (llama.EXPERT_DOWN, "down", ExpertRows(is_turned=True)),
    )
)


_DENSE_GATE, _DENSE_UP, _DENSE_DOWN = (
    replace(weight, hugging_face=weight.hugging_face.replace("mlp", "feed_forward"))
    for weight in (llama.GATE, llama.UP, llama.DOWN)
)


def _has_experts(fields: Fields, i: int) -> bool:
    layers = fields.given.get("moe_layers")
    if layers is None:
        return (i + 1) % fields.integer("interleave_moe_layer_step") == 0
    if not isinstance(layers, list):
        raise fields.wrong("moe_layers", "a list of layers")
    return i in layers


def _layer(given: Given, i: int) -> Layer:
    fields, rotates, temperature = given.fields, llama.has_rope(given.fields, i), None
    if not rotates and fields.given.get("attn_temperature_tuning"):  # a flag, or 4 in files of 2025
        temperature = Temperature(fields.number("attn_scale") or 0.0, fields.integer("floor_scale"), ahead=1)
    fed = llama.feed_forward(given, gate=_DENSE_GATE, up=_DENSE_UP, down=_DENSE_DOWN)
    if _has_experts(fields, i):
        routed = llama.experts(fields, router=_ROUTER, gate=_GATE, up=_UP, down=_DOWN, scales_inputs=True)
        fed = *routed, Add(), *llama.shared_expert("feed_forward.shared_expert")
    # transformers norms after the rotation, which keeps a head's sum of squares. GGUF does not say whether: llama.cpp does it
    # but in models of 128 experts, such as Maverick.
    norms = rotates and fields.flag("use_qk_norm", fields.given.get("num_experts") != 128)
    return llama.llama_layer(
        given, i, fed=fed, qkv=_QKV, rotates=rotates, has_plain_norms=norms, temperature=temperature
    )


def _sizes(fields: Fields) -> Mapping[str, Any]:
    """Llama Guard 4 has no experts."""
    sizes = llama.expert_sizes(16, "intermediate_size", "intermediate_size")
    of_experts = {} if fields.given.get("moe_layers") == [] else sizes(fields)
    return {**of_experts, "hidden_dim": fields.integer("intermediate_size_mlp")}


# What GGUF files do not say: llama.cpp's code has these values.
_UNSAID = {
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "attention_chunk_size": 8192,
    "no_rope_layer_interval": 4,
}

FAMILIES = (
    Family(
        "llama4_text",
        _layer,
        _UNSAID
        | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
        | {"intermediate_size": 8192, "intermediate_size_mlp": 16_384, "rope_theta": 500_000.0, "layer_types": None}
        | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
        is_sliding=llama.has_rope,
        optional_bias=("attention_bias",),
        reads=llama.EXPERT_FIELDS
        | dict.fromkeys((*_UNSAID, "use_qk_norm", "no_rope_layers"), "")
        | {"interleave_moe_layer_step": "interleave_moe_layer_step", "intermediate_size_mlp": "feed_forward_length"}
        | {"intermediate_size": "expert_feed_forward_length"},
        model=_sizes,
        wrappers=("llama4",),
        gguf="llama4",
        gguf_has_experts=True,
    ),
)
