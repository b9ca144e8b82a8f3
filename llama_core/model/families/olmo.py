"""OLMo 2 and 3: norms after each part, and of all heads of q and of k together. OLMo 3 has windows on three of four layers,
whose rotary embedding is not stretched."""

from dataclasses import replace

from llama_core.model.family import Family, Given
from llama_core.model.llama import K_NORM, Q_NORM, attention, feed_forward
from llama_core.model.operations import Add, Layer, Norm, Weight

ALL_HEAD_NORMS = replace(Q_NORM, outputs="heads"), replace(K_NORM, outputs="kv_heads")
_ATTENTION_NORM = Weight("post_attention_norm", "post_attention_layernorm", "post_attention_norm", "dim")
_FFN_NORM = Weight("post_ffn_norm", "post_feedforward_layernorm", "post_ffw_norm", "dim")


def _layer(given: Given, i: int) -> Layer:
    attended = *attention(given, i, norms=ALL_HEAD_NORMS), Norm(_ATTENTION_NORM), Add()
    return *attended, *feed_forward(given), Norm(_FFN_NORM), Add()


FAMILIES = (
    Family(
        "olmo2",
        _layer,
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        optional_bias=("attention_bias",),
    ),
    Family(
        "olmo3",
        _layer,
        {
            **{"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
            **{"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        },
        is_sliding=lambda fields, i: (i + 1) % fields.integer("sliding_window_pattern") != 0,
        optional_bias=("attention_bias",),
        local_theta="rope_theta",
        gguf="olmo2",
        gguf_is_neox=True,
    ),
)
