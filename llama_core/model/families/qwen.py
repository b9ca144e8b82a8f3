"""Qwen2, Qwen2.5 and R1-Distill-Qwen, with biases of q, k and v; Qwen3, with norms of q's and k's heads in their place."""

from functools import partial

from llama_core.model.family import Family
from llama_core.model.fields import Fields
from llama_core.model.llama import HEAD_NORMS, llama_layer

_DEFAULTS = {
    **{"max_position_embeddings": 32_768, "num_key_value_heads": 32, "layer_types": None},
    **{"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28},
}


def _is_sliding(fields: Fields, i: int) -> bool:
    return i >= fields.integer("max_window_layers", 28, least=0)


FAMILIES = (
    Family(
        "qwen2",
        llama_layer,
        _DEFAULTS,
        is_sliding=_is_sliding,
        qkv_bias=True,
        gguf="qwen2",
        gguf_is_neox=True,
    ),
    Family(
        "qwen3",
        partial(llama_layer, norms=HEAD_NORMS),
        _DEFAULTS | {"head_dim": 128},
        is_sliding=_is_sliding,
        optional_bias=("attention_bias",),
        gguf="qwen3",
        gguf_is_neox=True,
    ),
)
