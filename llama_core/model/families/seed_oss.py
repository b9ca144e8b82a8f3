"""Seed-OSS: the attention's last product has a flag of its own for biases; GGUF files name the second norm otherwise."""

from dataclasses import replace

from llama_core.model.family import Family, Given
from llama_core.model.llama import FFN_NORM, llama_layer
from llama_core.model.operations import Layer

_FFN_NORM = replace(FFN_NORM, gguf="post_attention_norm")


def _layer(given: Given, i: int) -> Layer:
    out_bias = given.fields.flag("attention_out_bias", given.out_bias)  # GGUF has no such field, but the weight
    return llama_layer(replace(given, out_bias=out_bias), i, ffn_norm=_FFN_NORM)


FAMILIES = (
    Family(
        "seed_oss",
        _layer,
        {
            **{"max_position_embeddings": 524_288, "num_key_value_heads": 8, "head_dim": 128},
            **{"attention_bias": True, "attention_out_bias": False},
        },
        optional_bias=("attention_bias", "mlp_bias"),
        gguf="seed_oss",
        gguf_is_neox=True,
    ),
)
