"""Granite 3: multipliers of the embedding, of what layers add, and of scores; logits are divided."""

from llama_core.model.family import Family, Given
from llama_core.model.llama import llama_layer
from llama_core.model.operations import Layer


def _layer(given: Given, i: int) -> Layer:
    scale, multiplier = (given.fields.number(f"{each}_multiplier") or 1.0 for each in ("attention", "residual"))
    return llama_layer(given, i, scale=scale, multiplier=multiplier)


FAMILIES = (
    Family(
        "granite",
        _layer,
        {"max_position_embeddings": 2048},
        optional_bias=("attention_bias", "mlp_bias"),
        reads={
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        },
        model=lambda fields: {
            "embedding_multiplier": fields.number("embedding_multiplier") or 1.0,
            "logits_divisor": fields.number("logits_scaling") or 1.0,
        },
        gguf="granite",
    ),
)
