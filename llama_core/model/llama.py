"""The layer of Llama and of its nearest relatives, in parts of which other families make theirs."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from llama_core.model.family import Given
from llama_core.model.fields import Fields
from llama_core.model.operations import (
    Activation,
    Add,
    Again,
    Attend,
    ExpertSum,
    Extent,
    GatedExperts,
    GatedLinear,
    Layer,
    Linear,
    Norm,
    Operation,
    Rotate,
    Route,
    Temperature,
    TokenGate,
    Weight,
)

ATTENTION_NORM = Weight("attention_norm", "input_layernorm", "attn_norm", "dim")
Q = Weight("attention.wq", "self_attn.q_proj", "attn_q", "heads", "dim", is_rotated=True)
K = Weight("attention.wk", "self_attn.k_proj", "attn_k", "kv_heads", "dim", is_rotated=True)
V = Weight("attention.wv", "self_attn.v_proj", "attn_v", "kv_heads", "dim")
Q_NORM = Weight("attention.q_norm", "self_attn.q_norm", "attn_q_norm", "head", is_rotated=True)
K_NORM = Weight("attention.k_norm", "self_attn.k_norm", "attn_k_norm", "head", is_rotated=True)
HEAD_NORMS = Q_NORM, K_NORM
OUT = Weight("attention.wo", "self_attn.o_proj", "attn_output", "dim", "heads")
# Norms around each part, of families that have them.
POST_ATTENTION_NORM = Weight("post_attention_norm", "post_attention_layernorm", "post_attention_norm", "dim")
PRE_FFN_NORM = Weight("ffn_norm", "pre_feedforward_layernorm", "ffn_norm", "dim")
POST_FFN_NORM = Weight("post_ffn_norm", "post_feedforward_layernorm", "post_ffw_norm", "dim")
FFN_NORM = Weight("ffn_norm", "post_attention_layernorm", "ffn_norm", "dim")
GATE = Weight("feed_forward.w1", "mlp.gate_proj", "ffn_gate", "hidden", "dim")
DOWN = Weight("feed_forward.w2", "mlp.down_proj", "ffn_down", "dim", "hidden")
UP = Weight("feed_forward.w3", "mlp.up_proj", "ffn_up", "hidden", "dim")


ROUTER = Weight("feed_forward.router", "mlp.gate", "ffn_gate_inp", "experts", "dim")


def _expert(ours: str, theirs: str, outputs: Extent, inputs: Extent) -> Weight:
    names = f"feed_forward.experts.{{}}.{ours}", f"mlp.experts.{{}}.{theirs}_proj", f"ffn_{theirs}_exps"
    return Weight(*names, outputs, inputs, of_experts=True)


EXPERT_GATE = _expert("w1", "gate", "expert_hidden", "dim")
EXPERT_DOWN = _expert("w2", "down", "dim", "expert_hidden")
EXPERT_UP = _expert("w3", "up", "expert_hidden", "dim")


def attention(
    given: Given,
    i: int,
    *,
    qkv: tuple[Weight, ...] = (Q, K, V),
    rotates: bool = True,
    norms: tuple[Weight, Weight] | None = None,
    has_plain_norms: bool = False,
    temperature: Temperature | None = None,
    scale: float | None = None,
    sinks: Weight | None = None,
) -> tuple[Operation, ...]:
    """From the attention's input to its output, in layer `i`. qkv: with the weight of gates as the fourth, if there is one."""
    rope = given.rope_of(i) if rotates else None
    return (
        Linear("qkv", tuple(replace(each, has_bias=given.qkv_bias) for each in qkv)),
        Rotate(rope, norms, has_plain_norms, temperature),
        Attend(given.windows[i], scale, is_gated=len(qkv) > 3, sinks=sinks),
        Linear("out", (replace(OUT, has_bias=given.out_bias),)),
    )


def feed_forward(
    given: Given, *, gate: Weight = GATE, up: Weight = UP, down: Weight = DOWN, activation: Activation = "silu"
) -> tuple[Operation, ...]:
    """From the feed-forward layer's input to its output."""
    gate, up, down = (replace(each, has_bias=given.mlp_bias) for each in (gate, up, down))
    return GatedLinear("gate_up", (gate, up), activation), Linear("down", (down,))


# What families with experts read, with their keys in GGUF; transformers takes either of two names for their number.
EXPERT_FIELDS: Final = {
    "num_experts": "expert_count",
    "num_local_experts": "",
    "num_experts_per_tok": "expert_used_count",
}


def expert_sizes(count: int, width: str, shared: str = "") -> Callable[[Fields], Mapping[str, Any]]:
    """`Family.model` of a family with `count` experts, if the file does not say, and the field `width` of each. shared: the
    field of a shared expert's width, if there is one."""
    return lambda fields: {
        "n_experts": fields.integer("num_local_experts", fields.integer("num_experts", count)),
        "expert_dim": fields.integer(width),
        "shared_dim": fields.integer(shared) if shared else 0,
    }


def experts(
    fields: Fields,
    *,
    router: Weight = ROUTER,
    gate: Weight = EXPERT_GATE,
    up: Weight = EXPERT_UP,
    down: Weight = EXPERT_DOWN,
    activation: Activation = "silu",
    norm_topk: bool = True,
    scales_inputs: bool = False,
) -> tuple[Operation, ...]:
    """From the input of a layer's experts to their output."""
    route = Route(router, fields.integer("num_experts_per_tok"), norm_topk, scales_inputs)
    return route, GatedExperts("experts_gate_up", (gate, up), activation), ExpertSum("experts_down", (down,))


def shared_expert(place: str, *, gate: Weight | None = None) -> tuple[Operation, ...]:
    """After experts and their `Add`, to the output of an expert that all tokens share. place: of its weights in Hugging Face's
    files. gate: of a `TokenGate`."""
    gates, up, down = (
        replace(
            each,
            name=each.name.replace("feed_forward", "feed_forward.shared_expert"),
            hugging_face=each.hugging_face.replace("mlp", place),
            gguf=f"{each.gguf}_shexp",
        )
        for each in (GATE, UP, DOWN)
    )
    parts = replace(gates, outputs="shared_hidden"), replace(up, outputs="shared_hidden")
    product = Linear("shared_down", (replace(down, inputs="shared_hidden"),))
    return Again(), GatedLinear("shared_gate_up", parts), *((TokenGate(gate),) if gate else ()), product


def all_but_each_nth(fields: Fields, i: int) -> bool:
    """`Family.is_sliding` where every sliding_window_pattern-th layer attends to all positions."""
    return (i + 1) % fields.integer("sliding_window_pattern") != 0


def has_rope(fields: Fields, i: int) -> bool:
    """Whether layer `i` is rotated: no_rope_layers has 1 for those that are."""
    layers = fields.given.get("no_rope_layers")
    if layers in (None, []):
        return (i + 1) % fields.integer("no_rope_layer_interval") != 0
    if not isinstance(layers, list) or len(layers) <= i or layers[i] not in (0, 1):
        raise fields.wrong("no_rope_layers", "a list of 0 or 1 for each layer")
    return bool(layers[i])


def llama_layer(
    given: Given,
    i: int,
    *,
    gate: Weight = GATE,
    up: Weight = UP,
    ffn_norm: Weight = FFN_NORM,
    multiplier: float = 1.0,
    fed: tuple[Operation, ...] = (),
    **of_attention: Any,
) -> Layer:
    """Layer `i`, with a norm before the attention and one before the feed-forward layer, or before `fed` in its place.
    multiplier: of what each adds."""
    attended, fed = attention(given, i, **of_attention), fed or feed_forward(given, gate=gate, up=up)
    return Norm(ATTENTION_NORM), *attended, Add(multiplier), Norm(ffn_norm), *fed, Add(multiplier)
