"""Llama 1 to 3.3, Code Llama, TinyLlama, Vicuna, Yi, SmolLM2, R1-Distill-Llama; Mistral and Ministral, which have windows;
Mistral Small 3.x."""

from llama_core.model.family import Family
from llama_core.model.llama import llama_layer

_MISTRAL = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}
FAMILIES = (
    Family(
        "llama",
        llama_layer,
        {"max_position_embeddings": 2048},
        optional_bias=("attention_bias", "mlp_bias"),
        gguf="llama",
    ),
    Family("mistral", llama_layer, _MISTRAL, wrappers=("mistral3",)),
    Family("ministral", llama_layer, _MISTRAL | {"layer_types": None}),
)
