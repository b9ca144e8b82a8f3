"""OLMoE: experts, and norms of all heads of q and of k together."""

from llama_core.model.families.olmo import ALL_HEAD_NORMS
from llama_core.model.family import Family, Given
from llama_core.model.llama import experts, llama_layer, num_experts
from llama_core.model.operations import Layer, Scoring


def _layer(given: Given, i: int) -> Layer:
    scoring: Scoring = "chosen" if given.fields.flag("norm_topk_prob") else "all"
    fed = experts(given.fields.integer("num_experts_per_tok"), scoring)
    return llama_layer(given, i, norms=ALL_HEAD_NORMS, fed=fed)


FAMILIES = (
    Family(
        "olmoe",
        _layer,
        {
            **{
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "num_experts_per_tok": 8,
                "norm_topk_prob": False,
            },
            **{"intermediate_size": 2048},
        },
        optional_bias=("attention_bias",),
        reads={
            "num_experts": "expert_count",
            "num_local_experts": "",
            "num_experts_per_tok": "expert_used_count",
            "intermediate_size": "feed_forward_length",
            "norm_topk_prob": "expert_weights_norm",
        },
        model=lambda fields: {
            "n_experts": num_experts(fields, 64),
            "expert_dim": fields.integer("intermediate_size"),
        },
        gguf="olmoe",
        gguf_has_experts=True,
        gguf_is_neox=True,
    ),
)
