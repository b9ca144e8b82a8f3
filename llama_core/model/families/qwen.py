"""Qwen2, Qwen2.5 and R1-Distill-Qwen, with biases of q, k and v; Qwen3, with norms of q's and k's heads in their place."""

from functools import partial

from llama_core.model.family import Family
from llama_core.model.fields import Fields
from llama_core.model.llama import layer_of


def _is_sliding(fields: Fields, i: int) -> bool:
    first = fields.given.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise fields.wrong("max_window_layers", "an integer of at least 0")
    return i >= first


FAMILIES = (
    Family(
        "qwen2",
        ("Qwen2ForCausalLM",),
        layer_of,
        positions=32_768,
        kv_heads=32,
        window=4096,
        has_window_flag=True,
        has_layer_types=True,
        is_sliding=_is_sliding,
        qkv_bias=True,
        gguf="qwen2",
        gguf_halves=True,
    ),
    Family(
        "qwen3",
        ("Qwen3ForCausalLM",),
        partial(layer_of, qk_norm=True),
        positions=32_768,
        kv_heads=32,
        head_dim=128,
        window=4096,
        has_window_flag=True,
        has_layer_types=True,
        is_sliding=_is_sliding,
        optional_bias=("attention_bias",),
        gguf="qwen3",
        gguf_halves=True,
    ),
)
