"""OLMo 2 and 3: norms after each part, and of all heads of q and of k together. OLMo 3 has windows on three of four layers,
whose rotary embedding is not stretched."""

from dataclasses import replace

from llama_core.model.family import Family, Given
from llama_core.model.llama import (
    K_NORM,
    POST_ATTENTION_NORM,
    POST_FFN_NORM,
    Q_NORM,
    all_but_each_nth,
    attention,
    feed_forward,
)
from llama_core.model.operations import Add, Layer, Norm

ALL_HEAD_NORMS = replace(Q_NORM, outputs="heads"), replace(K_NORM, outputs="kv_heads")


def _layer(given: Given, i: int) -> Layer:
    attended = *attention(given, i, norms=ALL_HEAD_NORMS), Norm(POST_ATTENTION_NORM), Add()
    return *attended, *feed_forward(given), Norm(POST_FFN_NORM), Add()


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
        is_sliding=all_but_each_nth,
        optional_bias=("attention_bias",),
        local_theta="rope_theta",
        gguf="olmo2",
        gguf_is_neox=True,
    ),
)
