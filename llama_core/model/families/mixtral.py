"""Mixtral: Mistral with experts in place of the feed-forward layer."""

from dataclasses import replace

from llama_core.model.family import Family, Given
from llama_core.model.llama import (
    EXPERT_DOWN,
    EXPERT_FIELDS,
    EXPERT_GATE,
    EXPERT_UP,
    ROUTER,
    expert_sizes,
    experts,
    llama_layer,
)
from llama_core.model.operations import Layer

_NAMES = {EXPERT_GATE: "w1", EXPERT_DOWN: "w2", EXPERT_UP: "w3"}
_GATE, _DOWN, _UP = (
    replace(weight, hugging_face=f"block_sparse_moe.experts.{{}}.{name}") for weight, name in _NAMES.items()
)
_ROUTER = replace(ROUTER, hugging_face="block_sparse_moe.gate")


def _layer(given: Given, i: int) -> Layer:
    fed = experts(given.fields, router=_ROUTER, gate=_GATE, up=_UP, down=_DOWN)
    return llama_layer(given, i, fed=fed)


FAMILIES = (
    Family(
        "mixtral",
        _layer,
        {
            **{"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": None, "rope_theta": 1e6},
            **{"rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "intermediate_size": 14_336},
        },
        reads=EXPERT_FIELDS | {"intermediate_size": "feed_forward_length"},
        model=expert_sizes(8, "intermediate_size"),
        gguf="llama",
        gguf_has_experts=True,
    ),
)
