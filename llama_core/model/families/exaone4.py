"""EXAONE 4: norms after the attention and after the feed-forward layer, norms of q's and k's heads; in models with windows, the
layers without one are not rotated."""

from llama_core.model.family import Family, Given
from llama_core.model.llama import (
    HEAD_NORMS,
    POST_ATTENTION_NORM,
    POST_FFN_NORM,
    all_but_each_nth,
    attention,
    feed_forward,
)
from llama_core.model.operations import Add, Layer, Norm


def _layer(given: Given, i: int) -> Layer:
    has_windows = "sliding_window" in given.fields.given
    attended = attention(given, i, rotates=not has_windows or given.windows[i] > 0, norms=HEAD_NORMS)
    return *attended, Norm(POST_ATTENTION_NORM), Add(), *feed_forward(given), Norm(POST_FFN_NORM), Add()


FAMILIES = (
    Family(
        "exaone4",
        _layer,
        {
            **{"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
            **{"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
        },
        is_sliding=all_but_each_nth,
        reads={"sliding_window": "attention.sliding_window"},
        gguf="exaone4",
        gguf_is_neox=True,
    ),
)
