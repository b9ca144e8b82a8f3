"""GLM-4-0414: norms before and after each part, gate and up in one matrix, and half of each head rotated, whose rows lie in
Meta's order in every file."""

from dataclasses import replace

from llama_core.model.family import Family, Given
from llama_core.model.llama import ATTENTION_NORM, GATE, UP, K, Q, V, attention, feed_forward
from llama_core.model.operations import Add, Layer, Norm, Weight

_QKV = replace(Q, is_rotated=False), replace(K, is_rotated=False), V
_GATE, _UP = (replace(each, hugging_face="mlp.gate_up_proj", gguf="ffn_up") for each in (GATE, UP))
_AFTER = Weight("post_attention_norm", "post_self_attn_layernorm", "post_attention_norm", "dim")
_BEFORE_FFN = Weight("ffn_norm", "post_attention_layernorm", "ffn_norm", "dim")
_AFTER_FFN = Weight("post_ffn_norm", "post_mlp_layernorm", "post_ffw_norm", "dim")


def _layer(given: Given, i: int) -> Layer:
    attended = attention(replace(given, out_bias=False), i, qkv=_QKV)
    first = Norm(ATTENTION_NORM), *attended, Norm(_AFTER), Add()
    return *first, Norm(_BEFORE_FFN), *feed_forward(given, gate=_GATE, up=_UP), Norm(_AFTER_FFN), Add()


FAMILIES = (
    Family(
        "glm4",
        _layer,
        {
            **{"max_position_embeddings": 131_072, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
            **{"rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
        },
        optional_bias=("attention_bias",),
        reads={"partial_rotary_factor": "rope.dimension_count"},
        gguf="glm4",
    ),
)
