"""Llama 1 to 3.3, Code Llama, TinyLlama, Vicuna, Yi, SmolLM2, R1-Distill-Llama; Mistral and Ministral, which have windows."""

from llama_core.model.family import Family
from llama_core.model.llama import layer_of

FAMILIES = (
    Family(
        "llama",
        ("LlamaForCausalLM", "LLaMAForCausalLM"),
        layer_of,
        positions=2048,
        optional_bias=("attention_bias", "mlp_bias"),
        gguf="llama",
    ),
    Family("mistral", ("MistralForCausalLM",), layer_of, positions=131_072, kv_heads=8, window=4096),
    Family(
        "ministral",
        ("MinistralForCausalLM",),
        layer_of,
        positions=131_072,
        kv_heads=8,
        window=4096,
        has_layer_types=True,
    ),
)
