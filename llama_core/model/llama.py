"""The layer of Llama and of its nearest relatives, in parts of which other families make theirs."""

from dataclasses import replace

from llama_core.model.family import Given
from llama_core.model.operations import (
    FULL_ATTENTION,
    Add,
    Attend,
    GatedLinear,
    Layer,
    Linear,
    Norm,
    Operation,
    Rotate,
    Weight,
)
from llama_core.model.rope import RopeConfig

ATTENTION_NORM = Weight("attention_norm", "input_layernorm", "attn_norm", "dim")
Q = Weight("attention.wq", "self_attn.q_proj", "attn_q", "heads", "dim", is_rotated=True)
K = Weight("attention.wk", "self_attn.k_proj", "attn_k", "kv_heads", "dim", is_rotated=True)
V = Weight("attention.wv", "self_attn.v_proj", "attn_v", "kv_heads", "dim")
Q_NORM = Weight("attention.q_norm", "self_attn.q_norm", "attn_q_norm", "head", is_rotated=True)
K_NORM = Weight("attention.k_norm", "self_attn.k_norm", "attn_k_norm", "head", is_rotated=True)
OUT = Weight("attention.wo", "self_attn.o_proj", "attn_output", "dim", "heads")
FFN_NORM = Weight("ffn_norm", "post_attention_layernorm", "ffn_norm", "dim")
GATE = Weight("feed_forward.w1", "mlp.gate_proj", "ffn_gate", "hidden", "dim")
DOWN = Weight("feed_forward.w2", "mlp.down_proj", "ffn_down", "dim", "hidden")
UP = Weight("feed_forward.w3", "mlp.up_proj", "ffn_up", "hidden", "dim")


def attention(
    rope: RopeConfig | None,
    window: int = FULL_ATTENTION,
    *,
    qkv: tuple[Weight, ...] = (Q, K, V),
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    scale: float | None = None,
) -> tuple[Operation, ...]:
    """From the attention's input to its output."""
    return (
        Linear("qkv", tuple(replace(each, has_bias=qkv_bias) for each in qkv)),
        Rotate(rope, (Q_NORM, K_NORM) if qk_norm else None),
        Attend(window, scale),
        Linear("out", (replace(OUT, has_bias=out_bias),)),
    )


def feed_forward(*, gate: Weight = GATE, up: Weight = UP, bias: bool = False) -> tuple[Operation, ...]:
    """From the feed-forward layer's input to its output."""
    gate, up, down = (replace(each, has_bias=bias) for each in (gate, up, DOWN))
    return GatedLinear("gate_up", (gate, up)), Linear("down", (down,))


def layer_of(
    given: Given,
    i: int,
    *,
    rotates: bool = True,
    qk_norm: bool = False,
    scale: float | None = None,
    multiplier: float = 1.0,
) -> Layer:
    """Layer `i` with what a file says of it: `llama_layer`."""
    attended = attention(
        given.rope if rotates else None,
        given.window(i),
        qkv_bias=given.qkv_bias,
        out_bias=given.out_bias,
        qk_norm=qk_norm,
        scale=scale,
    )
    return llama_layer(attended, feed_forward(bias=given.mlp_bias), multiplier)


def llama_layer(attended: tuple[Operation, ...], fed: tuple[Operation, ...], multiplier: float = 1.0) -> Layer:
    """A layer with a norm before the attention, and before the feed-forward layer. multiplier: of what each adds."""
    return Norm(ATTENTION_NORM), *attended, Add(multiplier), Norm(FFN_NORM), *fed, Add(multiplier)
