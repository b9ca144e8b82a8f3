"""The format of every matrix, from how the checkpoint stores it and what the operator asks for."""

from collections.abc import Mapping

import pytest

from llama_core.backends.weight_plan import WeightPlan, plan_weights
from llama_core.files.meta_params import config_from_params
from llama_core.files.source import DENSE

# 6 heads of 16 dimensions: half of them are 48 inputs of wo, which is no multiple of 32. Half of the 256 hidden units is.
CONFIG = config_from_params(
    {"dim": 96, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "multiple_of": 256, "norm_eps": 1e-5}, vocab_size=640
)


def planned(
    stored: Mapping[str, str] | str, quantization: str = "auto", dtype: str = "bfloat16", world_size: int = 1
) -> WeightPlan:
    """`stored`: the format of each weight by the end of its name, or of all weights."""

    def stored_format(name: str) -> str:
        if isinstance(stored, str):
            return stored
        return next((found for end, found in stored.items() if name.endswith(end)), DENSE)

    return plan_weights(CONFIG, stored_format, quantization, dtype, world_size)


def test_auto_keeps_each_matrix_as_it_is_stored() -> None:
    plan = planned({"output.weight": "int8_groups", "wq.weight": "int4", "wk.weight": "int4", "wv.weight": "int4"})
    assert plan.matrices["layers.1.qkv"] == "int4" and plan.matrices["layers.1.out"] == "bfloat16"
    assert plan.format_of("layers.0.attention.wk.weight") == "int4"
    assert plan.format_of("output.weight") == "int8_groups"
    assert plan.format_of("tok_embeddings.weight") == plan.format_of("layers.0.ffn_norm.weight") == "bfloat16"
    assert plan.format_of("layers.0.attention.wq.bias") == "bfloat16"
    assert plan.keeps_groups("layers.0.attention.wv.weight") and not plan.keeps_groups("layers.0.attention.wo.weight")
    assert str(plan) == "bfloat16 with int4 (2 matrices), int8_groups (output)"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("int4", "int4", "int4_min"), "int4_min"),
        (("int4", "int4", "int8_groups"), "bfloat16"),
        (("int4_min", "int4_min", DENSE), "bfloat16"),
    ],
)
def test_parts_of_one_matrix_that_are_stored_differently_share_a_format(parts: tuple[str, ...], expected: str) -> None:
    plan = planned(dict(zip(("wq.weight", "wk.weight", "wv.weight"), parts, strict=True)))
    assert plan.matrices["layers.0.qkv"] == expected
    assert plan.keeps_groups("layers.0.attention.wq.weight") is (expected != "bfloat16")


def test_a_matrix_whose_groups_the_ranks_cut_is_expanded() -> None:
    plan = planned("int4", world_size=2)
    assert plan.expanded == ("layers.0.out", "layers.1.out")
    assert plan.matrices["layers.0.out"] == "bfloat16" and plan.matrices["layers.0.down"] == "int4"
    again = planned("int4", "int4", world_size=2)
    assert again.matrices["layers.0.out"] == "int4" and not again.keeps_groups("layers.0.attention.wo.weight")
    assert planned("int4").expanded == planned(DENSE, world_size=2).expanded == ()
