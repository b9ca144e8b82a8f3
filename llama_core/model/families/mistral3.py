"""Ministral 3: queries at positions beyond the original context are multiplied by a temperature."""

from llama_core.model.family import Family, Given
from llama_core.model.fields import Fields
from llama_core.model.llama import llama_layer
from llama_core.model.operations import Layer, Temperature

_BETA = "llama_4_scaling_beta"
_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, _BETA: 0.1},
}


def _layer(given: Given, i: int) -> Layer:
    fields = given.fields
    rope = fields.inner("rope_scaling") or fields.inner("rope_parameters") or Fields({}, "")
    beta = rope.number(_BETA) or fields.number(_BETA)
    if beta is None:
        return llama_layer(given, i)
    if given.rope.original_context is None:
        raise fields.fault(_BETA, "needs a rotary embedding with an original context")
    return llama_layer(given, i, temperature=Temperature(beta, given.rope.original_context))


FAMILIES = (
    Family(
        "ministral3",
        _layer,
        {
            **{"max_position_embeddings": 262_144, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
            **{"sliding_window": None, "rope_parameters": _ROPE},
        },
        reads={
            _BETA: "attention.temperature_scale",
            "max_position_embeddings": "context_length",
            "mscale_all_dim": "rope.scaling.yarn_log_multiplier",
        },
        wrappers=("mistral3",),
        gguf="mistral3",
    ),
)
