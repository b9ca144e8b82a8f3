"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: q, k and v in one matrix, gate and up in one, LongRoPE of a part of each head."""

from dataclasses import replace
from functools import partial

from llama_core.model.family import Family
from llama_core.model.llama import GATE, UP, K, Q, V, llama_layer

_QKV = tuple(replace(each, hugging_face="self_attn.qkv_proj", gguf="attn_qkv") for each in (Q, K, V))
_GATE, _UP = (replace(each, hugging_face="mlp.gate_up_proj", gguf="ffn_up") for each in (GATE, UP))
FAMILIES = (
    Family(
        "phi3",
        partial(llama_layer, qkv=_QKV, gate=_GATE, up=_UP),
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
