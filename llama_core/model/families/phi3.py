"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: q, k and v in one matrix, gate and up in one, LongRoPE of a part of each head."""

from dataclasses import replace

from llama_core.model.family import Family, Given
from llama_core.model.llama import GATE, UP, K, Q, V, attention, feed_forward, llama_layer
from llama_core.model.operations import Layer

_QKV = tuple(replace(each, hugging_face="self_attn.qkv_proj", gguf="attn_qkv") for each in (Q, K, V))
_GATE, _UP = (replace(each, hugging_face="mlp.gate_up_proj", gguf="ffn_up") for each in (GATE, UP))


def _layer(given: Given, i: int) -> Layer:
    return llama_layer(attention(given.rope, given.window(i), qkv=_QKV), feed_forward(gate=_GATE, up=_UP))


FAMILIES = (
    Family(
        "phi3",
        ("Phi3ForCausalLM",),
        _layer,
        positions=4096,
        norm_eps=1e-5,
        window=0,
        is_partial=True,
        gguf="phi3",
        gguf_halves=True,
    ),
)
