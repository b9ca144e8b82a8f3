"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: q, k and v in one matrix, gate and up in one, LongRoPE of a part of each head."""

from dataclasses import replace

from llama_core.model.family import Family, Given
from llama_core.model.llama import ATTENTION_NORM, FFN_NORM, GATE, UP, K, Q, V, attention, feed_forward
from llama_core.model.operations import Add, Layer, Norm

_QKV = tuple(replace(each, hugging_face="self_attn.qkv_proj", gguf="attn_qkv") for each in (Q, K, V))
_GATE, _UP = (replace(each, hugging_face="mlp.gate_up_proj", gguf="ffn_up") for each in (GATE, UP))


def _layer(given: Given, i: int) -> Layer:
    fed = feed_forward(given, gate=_GATE, up=_UP)
    return Norm(ATTENTION_NORM), *attention(given, i, qkv=_QKV), Add(), Norm(FFN_NORM), *fed, Add()


FAMILIES = (
    Family(
        "phi3",
        _layer,
        {
            **{"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
            **{"rms_norm_eps": 1e-5, "sliding_window": None},
        },
        rope_types={"su": "longrope", "yarn": "longrope"},
        reads={"partial_rotary_factor": "rope.dimension_count"},
        gguf="phi3",
        gguf_is_neox=True,
    ),
)
