"""Plans of weights without a backend."""

from collections.abc import Callable

from llama_core.backends.weight_plan import WeightPlan, plan_weights
from llama_core.model.config import ModelConfig
from llama_core.model.weight_formats import CODINGS, PORTABLE


def plan_of(
    model: ModelConfig,
    stored_format: Callable[[str], str],
    quantization: str = "auto",
    dtype: str = "float32",
    world_size: int = 1,
    *,
    is_native: bool = False,
) -> WeightPlan:
    """is_native: for the native engine and activations in bfloat16, else for torch."""
    codings, rest = (CODINGS, "int8_groups") if is_native else (PORTABLE, dtype)
    return plan_weights(model, stored_format, quantization, dtype, world_size, codings, rest)
