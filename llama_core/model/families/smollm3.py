"""SmolLM3: every fourth layer is not rotated."""

from llama_core.model.family import Family
from llama_core.model.fields import Fields
from llama_core.model.llama import llama_layer


def _has_rope(fields: Fields, i: int) -> bool:
    """no_rope_layers has 1 for a layer that is rotated."""
    layers = fields.given.get("no_rope_layers")
    if layers is None:
        return (i + 1) % fields.integer("no_rope_layer_interval") != 0
    if not isinstance(layers, list) or len(layers) <= i or layers[i] not in (0, 1):
        raise fields.wrong("no_rope_layers", "a list of 0 or 1 for each layer")
    return bool(layers[i])


FAMILIES = (
    Family(
        "smollm3",
        lambda given, i: llama_layer(given, i, rotates=_has_rope(given.fields, i)),
        {
            **{
                "max_position_embeddings": 32_768,
                "num_key_value_heads": 4,
                "rope_theta": 2e6,
                "tie_word_embeddings": True,
            },
            **{"sliding_window": None, "use_sliding_window": False, "layer_types": None, "no_rope_layer_interval": 4},
        },
        is_sliding=lambda fields, i: not _has_rope(fields, i),
        optional_bias=("attention_bias", "mlp_bias"),
        reads={"no_rope_layers": "", "no_rope_layer_interval": ""},
        gguf="smollm3",
    ),
)
