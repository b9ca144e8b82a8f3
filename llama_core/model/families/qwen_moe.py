"""Qwen3 with experts, such as Qwen3-30B-A3B, of which some layers may have none."""

from llama_core.model.family import Family, Given
from llama_core.model.llama import EXPERT_FIELDS, HEAD_NORMS, expert_sizes, experts, llama_layer
from llama_core.model.operations import Layer


def _layer(given: Given, i: int) -> Layer:
    fields = given.fields
    dense = fields.given.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.wrong("mlp_only_layers", "a list of layers")
    if i in dense or (i + 1) % fields.integer("decoder_sparse_step", 1):
        return llama_layer(given, i, norms=HEAD_NORMS)
    norm_topk = fields.flag("norm_topk_prob", True)  # absent in GGUF, where llama.cpp always normalizes
    return llama_layer(given, i, norms=HEAD_NORMS, fed=experts(fields, norm_topk=norm_topk))


FAMILIES = (
    Family(
        "qwen3_moe",
        _layer,
        {
            **{"max_position_embeddings": 32_768, "num_key_value_heads": 4, "sliding_window": 4096},
            **{"use_sliding_window": False, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            **{"norm_topk_prob": False, "decoder_sparse_step": 1, "intermediate_size": 6144},
        },
        optional_bias=("attention_bias",),
        reads=EXPERT_FIELDS
        | {"moe_intermediate_size": "expert_feed_forward_length", "norm_topk_prob": "expert_weights_norm"},
        model=expert_sizes(128, "moe_intermediate_size"),
        gguf="qwen3moe",
        gguf_has_experts=True,
        gguf_is_neox=True,
    ),
)
