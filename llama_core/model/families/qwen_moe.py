"""Qwen with experts, in all layers or some: Qwen1.5-MoE and Qwen2-57B-A14B, where all tokens share one more, behind a gate of
its own; Qwen3-30B-A3B and its like."""

from typing import Final

from llama_core.model.family import Family, Given
from llama_core.model.llama import EXPERT_FIELDS, HEAD_NORMS, expert_sizes, experts, llama_layer, shared_expert
from llama_core.model.operations import Add, Layer, Weight

_SHARED_GATE = Weight(
    "feed_forward.shared_expert.gate", "mlp.shared_expert_gate", "ffn_gate_inp_shexp", outputs="one", inputs="dim"
)


def _qwen2_layer(given: Given, i: int) -> Layer:
    if not _has_experts(given, i):
        return llama_layer(given, i)
    routed = experts(given.fields, norm_topk=given.fields.flag("norm_topk_prob"))
    return llama_layer(given, i, fed=(*routed, Add(), *shared_expert("mlp.shared_expert", gate=_SHARED_GATE)))


def _qwen3_layer(given: Given, i: int) -> Layer:
    if not _has_experts(given, i):
        return llama_layer(given, i, norms=HEAD_NORMS)
    norm_topk = given.fields.flag("norm_topk_prob", True)  # absent in GGUF, where llama.cpp always normalizes
    return llama_layer(given, i, norms=HEAD_NORMS, fed=experts(given.fields, norm_topk=norm_topk))


def _has_experts(given: Given, i: int) -> bool:
    dense = given.fields.given.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise given.fields.wrong("mlp_only_layers", "a list of layers")
    return i not in dense and (i + 1) % given.fields.integer("decoder_sparse_step", 1) == 0


_DEFAULTS: Final = {
    **{"max_position_embeddings": 32_768, "sliding_window": 4096, "use_sliding_window": False},
    **{"norm_topk_prob": False, "decoder_sparse_step": 1},
}
_READS: Final = EXPERT_FIELDS | {
    "moe_intermediate_size": "expert_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
}
_SHARED_WIDTH: Final = "shared_expert_intermediate_size"

FAMILIES = (
    Family(
        "qwen2_moe",
        _qwen2_layer,
        _DEFAULTS
        | {"num_key_value_heads": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, _SHARED_WIDTH: 5632}
        | {"intermediate_size": 5632, "layer_types": None, "max_window_layers": 28},
        is_sliding=lambda fields, i: i % 2 == 0 and i < fields.integer("max_window_layers", least=0),
        qkv_bias=True,
        reads=_READS | {_SHARED_WIDTH: "expert_shared_feed_forward_length"},
        model=expert_sizes(60, "moe_intermediate_size", _SHARED_WIDTH),
        gguf="qwen2moe",
        gguf_has_experts=True,
        gguf_is_neox=True,
    ),
    Family(
        "qwen3_moe",
        _qwen3_layer,
        _DEFAULTS
        | {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144},
        optional_bias=("attention_bias",),
        reads=_READS,
        model=expert_sizes(128, "moe_intermediate_size"),
        gguf="qwen3moe",
        gguf_has_experts=True,
        gguf_is_neox=True,
    ),
)
