"""SmolLM3: every fourth layer is not rotated."""

from llama_core.model.family import Family
from llama_core.model.llama import has_rope, llama_layer

FAMILIES = (
    Family(
        "smollm3",
        lambda given, i: llama_layer(given, i, rotates=has_rope(given.fields, i)),
        {
            **{
                "max_position_embeddings": 32_768,
                "num_key_value_heads": 4,
                "rope_theta": 2e6,
                "tie_word_embeddings": True,
            },
            **{"sliding_window": None, "use_sliding_window": False, "layer_types": None, "no_rope_layer_interval": 4},
        },
        is_sliding=lambda fields, i: not has_rope(fields, i),
        optional_bias=("attention_bias", "mlp_bias"),
        reads={"no_rope_layers": "", "no_rope_layer_interval": ""},
        gguf="smollm3",
    ),
)
