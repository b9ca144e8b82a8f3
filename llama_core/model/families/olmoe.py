"""OLMoE: experts, and norms of all heads of q and of k together."""

from llama_core.model.families.olmo import ALL_HEAD_NORMS
from llama_core.model.family import Family, Given
from llama_core.model.llama import EXPERT_FIELDS, expert_sizes, experts, llama_layer
from llama_core.model.operations import Layer


def _layer(given: Given, i: int) -> Layer:
    fields = given.fields
    fed = experts(fields, norm_topk=fields.flag("norm_topk_prob"))
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
        reads=EXPERT_FIELDS | {"intermediate_size": "feed_forward_length", "norm_topk_prob": "expert_weights_norm"},
        model=expert_sizes(64, "intermediate_size"),
        gguf="olmoe",
        gguf_has_experts=True,
        gguf_is_neox=True,
    ),
)
