"""A list of operations that makes no layer is refused when it is built, with its place."""

from dataclasses import replace

import pytest

from llama_core.errors import ConfigError
from llama_core.model.family import Given
from llama_core.model.llama import (
    ATTENTION_NORM,
    DOWN,
    EXPERT_DOWN,
    EXPERT_GATE,
    EXPERT_UP,
    FFN_NORM,
    GATE,
    K_NORM,
    OUT,
    Q_NORM,
    ROUTER,
    UP,
    K,
    Q,
    V,
    attention,
    feed_forward,
    shared_expert,
)
from llama_core.model.operations import (
    Add,
    Again,
    Attend,
    ExpertSum,
    GatedExperts,
    GatedLinear,
    Layer,
    Linear,
    Norm,
    Rotate,
    Route,
    TokenGate,
    Weight,
)
from llama_core.model.rope import RopeConfig
from tests.support.plain_model import decoder

SIZES = (64, 2, 4, 2, 16, 96, 90)
GIVEN = Given(RopeConfig(), (0,))
ATTENDED, FED = attention(GIVEN, 0), feed_forward(GIVEN)
QKV = Linear("qkv", (Q, K, V))
EXPERTS = Route(ROUTER, 2), GatedExperts("gate_up", (EXPERT_GATE, EXPERT_UP)), ExpertSum("down", (EXPERT_DOWN,))
TOKEN_GATE = Weight("gate", "gate", "gate", "one", "dim")
SHARED = shared_expert("mlp", gate=TOKEN_GATE)
REFUSED: dict[str, tuple[Layer, str]] = {
    "nothing": ((), "does not end with Add"),
    "an output that nobody adds": ((*ATTENDED, Add(), *FED), "does not end with Add"),
    "no attention": ((*FED, Add()), "must have one Attend"),
    "two attentions": ((*ATTENDED, Add(), *ATTENDED, Add()), "used before"),
    "a second cache": (
        (QKV, Rotate(None), Attend(), Rotate(None)),
        "operation 3 .Rotate.: takes heads, kv_heads, kv_heads",
    ),
    "an Add of the residual": ((*ATTENDED, Add(), Add()), "operation 5 .Add.: adds the residual to itself"),
    "an Add at the begin": ((Add(),), "operation 0 .Add.: adds the residual to itself"),
    "Again without an Add before": (
        (Norm(ATTENTION_NORM), Again(), *ATTENDED, Add()),
        "operation 1 .Again.: must follow Norm, experts and Add",
    ),
    "Again without experts": (
        (*ATTENDED, Add(), Norm(FFN_NORM), *FED, Add(), Again(), *FED, Add()),
        "operation 9 .Again.: must follow Norm, experts and Add",
    ),
    "a gate without a shared expert": (
        (*ATTENDED, Add(), Norm(FFN_NORM), FED[0], TokenGate(TOKEN_GATE), FED[1], Add()),
        "operation 7 .TokenGate.: gates hidden by one, not a shared expert by one",
    ),
    "a gate of many numbers": (
        (*ATTENDED, Add(), Norm(FFN_NORM), *EXPERTS, Add(), *shared_expert("mlp", gate=ROUTER), Add()),
        "operation 12 .TokenGate.: gates shared_hidden by experts, not a shared expert",
    ),
    "a gate of what no norm is kept for": (
        (*ATTENDED, Add(), Norm(FFN_NORM), *SHARED[1:], Add()),
        "operation 7 .TokenGate.: gates shared_hidden by one, not a shared expert",
    ),
    "an Add of a norm": (
        (*ATTENDED, Add(), Norm(FFN_NORM), *EXPERTS, Add(), Again(), Add()),
        "operation 11 .Add.: adds the value of a norm",
    ),
    "a weight used twice": (
        (*ATTENDED, Norm(FFN_NORM), Add(), Norm(FFN_NORM), *FED, Add()),
        "ffn_norm has been used",
    ),
    "q without k and v": (
        (Linear("q", (Q,)), Rotate(None)),
        "no backend multiplies dim to heads",
    ),
    "a product of another width": ((Linear("down", (DOWN,)), Add()), "takes hidden, but the value before it is dim"),
    "gates without their product": ((*ATTENDED, Add(), GatedLinear("gate_up", (GATE, UP)), Add()), "takes dim"),
    "attention without rotation": ((QKV, Attend(), Linear("out", (OUT,)), Add()), "takes queries"),
    "a norm of a head over the residual": (
        (Norm(Q_NORM), *ATTENDED, Add()),
        "norms head, but the value before it is dim",
    ),
    "parts of different inputs": ((Linear("qkv", (Q, K, replace(V, inputs="hidden"))),), "multiplies dim, hidden"),
    "a product of a product": ((*ATTENDED, *FED, Add()), "operation 4 .GatedLinear.: no backend multiplies dim"),
    "a norm with a bias": (
        (Norm(replace(ATTENTION_NORM, has_bias=True)), *ATTENDED, Add()),
        "operation 0 .Norm.: norms",
    ),
    "two norms": ((Norm(ATTENTION_NORM), Norm(FFN_NORM), *ATTENDED, Add()), "operation 1 .Norm.: norms dim"),
    "a norm of attention's output": (
        (*ATTENDED[:3], Norm(replace(FFN_NORM, outputs="heads"))),
        "takes dim, but the value",
    ),
    "a product without gates": (
        (Linear("up", (UP,)), Linear("down", (DOWN,)), Add()),
        "no backend multiplies dim to hidden",
    ),
    "a norm of all heads": (
        (QKV, Rotate(None, (replace(Q_NORM, outputs="heads"), K_NORM))),
        "norms heads, head, which must",
    ),
    "gates that nothing uses": (
        (Linear("qkv", (Q, K, V, replace(Q, name="gate"))), Rotate(None), Attend()),
        "operation 2 .Attend.: takes queries, but the value before it is queries, gates",
    ),
    "gates that nobody computes": ((QKV, Rotate(None), Attend(is_gated=True)), "takes queries, gates"),
    "norms of heads twice": ((QKV, Rotate(None, (Q_NORM, K_NORM), True)), "which must be of heads"),
    "a bias of q alone": ((Linear("qkv", (replace(Q, has_bias=True), K, V)),), "all its weights have a bias, or none"),
    "one tensor for two products": (
        (*ATTENDED, Add(), FED[0], Linear("out", (DOWN,)), Add()),
        "out has been used",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_list_that_makes_no_layer_is_refused_with_its_place(what: str) -> None:
    layer, message = REFUSED[what]
    good = decoder(*SIZES)
    with pytest.raises(ConfigError, match=rf"model: layer 1.*{message}"):
        replace(good, layers=(good.layers[0], layer)).check("model")


def test_layers_that_rotate_other_parts_of_a_head_are_refused() -> None:
    layers = tuple(decoder(*SIZES, rope=RopeConfig(dim=dim)).layers[0] for dim in (16, 8))
    with pytest.raises(ConfigError, match="rotate different parts"):
        replace(decoder(*SIZES), layers=layers).check("model")
