"""Muse Glimmer: norms before and after each part, whose factors are 1 + weight, norms of heads and of the embedding without
factors, gates on the attention's output, windows on three of four layers, of which the fourth is not rotated, capped logits."""

from dataclasses import replace
from typing import Any

from llama_core.model.family import Family, Given
from llama_core.model.fields import Fields
from llama_core.model.llama import (
    ATTENTION_NORM,
    HEAD_NORMS,
    POST_ATTENTION_NORM,
    POST_FFN_NORM,
    PRE_FFN_NORM,
    K,
    Q,
    V,
    attention,
    feed_forward,
)
from llama_core.model.operations import Add, Layer, Norm, Weight

_GATES = Weight("attention.gate", "self_attn.gate_proj", "attn_gate", "heads", "dim")
_BEFORE, _AFTER, _BEFORE_FFN, _AFTER_FFN = (
    replace(each, offset=1.0) for each in (ATTENTION_NORM, POST_ATTENTION_NORM, PRE_FFN_NORM, POST_FFN_NORM)
)


def _is_sliding(fields: Fields, i: int) -> bool:
    return (fields.integer("num_hidden_layers") - 1 - i) % fields.integer("sliding_window_pattern", 4) != 0


def _layer(given: Given, i: int) -> Layer:
    fields, thetas = given.fields, given.fields.given.get("layer_rope_theta")
    if thetas is not None and not (isinstance(thetas, list) and len(thetas) > i):
        raise fields.wrong("layer_rope_theta", "a list of a number for each layer")
    rotates = _is_sliding(fields, i) if thetas is None else bool(thetas[i])
    factor, eps = fields.number("qk_scale_factor"), fields.number("post_norm_eps")
    scale = None if factor is None else factor * fields.integer("head_dim") ** -0.5
    heads: dict[str, Any] = {"has_plain_norms": True, "scale": scale}
    if factor is None:  # GGUF: q's and k's norms have factors, which include the scale
        heads = {"norms": HEAD_NORMS}
    attended = attention(given, i, qkv=(Q, K, V, _GATES), rotates=rotates, **heads)
    first = Norm(_BEFORE), *attended, Norm(_AFTER, eps), Add()
    return *first, Norm(_BEFORE_FFN), *feed_forward(given), Norm(_AFTER_FFN, eps), Add()


FAMILIES = (
    Family(
        "muse_glimmer_text",
        _layer,
        {
            **{"max_position_embeddings": 131_072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
            **{
                "sliding_window": 2048,
                "sliding_window_pattern": 4,
                "layer_types": None,
                "final_logit_softcapping": 20.0,
                "qk_scale_factor": 3.87,
            },
            **{"output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8},
        },
        is_sliding=_is_sliding,
        reads={
            "post_norm_eps": "",
            "num_hidden_layers": "block_count",
            "final_logit_softcapping": "final_logit_softcapping",
            "output_multiplier": "logit_scale",
        },
        model=lambda fields: {
            "norms_embedding": True,
            "logits_divisor": 1 / (fields.number("output_multiplier") or 1.0),
            "logits_cap": fields.number("final_logit_softcapping"),
        },
        wrappers=("muse_glimmer",),
        gguf="muse-glimmer",
    ),
)
