"""Gemma 3: norms before and after each part, whose factors are 1 + weight; GeGLU; windows on five of six layers, which have a
rotary embedding of their own."""

from dataclasses import replace

from llama_core.model.family import Family, Given
from llama_core.model.llama import (
    ATTENTION_NORM,
    HEAD_NORMS,
    POST_ATTENTION_NORM,
    POST_FFN_NORM,
    PRE_FFN_NORM,
    all_but_each_nth,
    attention,
    feed_forward,
)
from llama_core.model.operations import Add, Layer, Norm

_NORMS = [replace(each, offset=1.0) for each in (ATTENTION_NORM, POST_ATTENTION_NORM, PRE_FFN_NORM, POST_FFN_NORM)]
_Q_NORM, _K_NORM = (replace(each, offset=1.0) for each in HEAD_NORMS)
_LAYERS_OF_27B = 62


def _layer(given: Given, i: int) -> Layer:
    fields = given.fields
    scalar = fields.number("query_pre_attn_scalar")
    if scalar is None:  # GGUF lacks it, and llama.cpp knows the models by their layers
        is_27b = fields.integer("num_hidden_layers") == _LAYERS_OF_27B
        per_head = fields.integer("hidden_size") // fields.integer("num_attention_heads")
        scalar = per_head if is_27b else fields.integer("head_dim")
    before, after, before_ffn, after_ffn = _NORMS
    attended = attention(given, i, norms=(_Q_NORM, _K_NORM), scale=scalar**-0.5)
    fed = feed_forward(given, activation="gelu_tanh")
    first = Norm(before), *attended, Norm(after), Add()
    return *first, Norm(before_ffn), *fed, Norm(after_ffn), Add()


FAMILIES = (
    Family(
        "gemma3_text",
        _layer,
        {
            **{"max_position_embeddings": 131_072, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2304},
            **{"intermediate_size": 9216, "num_attention_heads": 8, "num_hidden_layers": 26, "vocab_size": 262_208},
            **{
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
                "query_pre_attn_scalar": 256,
                "tie_word_embeddings": True,
            },
            **{"sliding_window": 4096, "sliding_window_pattern": 6, "layer_types": None},
            **{"hidden_activation": "gelu_pytorch_tanh"},
        },
        is_sliding=all_but_each_nth,
        local_theta="rope_local_base_freq",
        activations=("gelu_pytorch_tanh",),
        reads={
            "query_pre_attn_scalar": "attention.query_pre_attn_scalar",  # llama.cpp does not write it
            "hidden_size": "embedding_length",
            "num_attention_heads": "attention.head_count",
            "num_hidden_layers": "block_count",
            "head_dim": "attention.key_length",
        },
        model=lambda fields: {
            "embedding_multiplier": fields.integer("hidden_size") ** 0.5,
            "norm_offset": 1.0,
        },
        wrappers=("gemma3",),
        gguf="gemma3",
        gguf_is_neox=True,
    ),
)
