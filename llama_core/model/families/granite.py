"""Granite 3, dense and with experts: multipliers of the embedding, of what layers add, and of scores; logits are divided."""

from dataclasses import replace

from llama_core.model import llama
from llama_core.model.family import Family, Given
from llama_core.model.fields import Fields
from llama_core.model.operations import ExpertRows, Layer

_ROUTER = replace(llama.ROUTER, hugging_face="block_sparse_moe.router.layer")
_GATE, _UP, _DOWN = (
    replace(
        weight, hugging_face=f"block_sparse_moe.{name}_linear.weight", rows=ExpertRows(first, blocks, in_blocks=True)
    )
    for weight, name, first, blocks in (
        (llama.EXPERT_GATE, "input", 0, 2),
        (llama.EXPERT_UP, "input", 1, 2),
        (llama.EXPERT_DOWN, "output", 0, 1),
    )
)


def _layer(given: Given, i: int, fed: Layer = ()) -> Layer:
    scale, multiplier = (given.fields.number(f"{each}_multiplier") or 1.0 for each in ("attention", "residual"))
    return llama.llama_layer(given, i, scale=scale, multiplier=multiplier, fed=fed)


def _layer_with_experts(given: Given, i: int) -> Layer:
    return _layer(given, i, llama.experts(given.fields, router=_ROUTER, gate=_GATE, up=_UP, down=_DOWN))


def _multipliers(fields: Fields) -> dict[str, float]:
    return {
        "embedding_multiplier": fields.number("embedding_multiplier") or 1.0,
        "logits_divisor": fields.number("logits_scaling") or 1.0,
    }


_READS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}

FAMILIES = (
    Family(
        "granite",
        _layer,
        {"max_position_embeddings": 2048},
        optional_bias=("attention_bias", "mlp_bias"),
        reads=_READS,
        model=_multipliers,
        gguf="granite",
    ),
    Family(
        "granitemoe",
        _layer_with_experts,
        {"max_position_embeddings": 2048, "num_experts_per_tok": 2},
        optional_bias=("attention_bias",),
        reads=_READS | llama.EXPERT_FIELDS | {"intermediate_size": "feed_forward_length"},
        model=lambda fields: {**_multipliers(fields), **llama.expert_sizes(8, "intermediate_size")(fields)},
        gguf="granitemoe",
        gguf_has_experts=True,
    ),
)
