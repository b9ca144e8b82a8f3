"""The dtype in which a model computes, and its description."""

import torch

from llama_core.config import EngineConfig
from llama_core.execution.parallel import Parallel
from llama_core.execution.weight_plan import WeightPlan


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def preferred_dtype(config: EngineConfig, stored: torch.dtype, parallel: Parallel) -> torch.dtype:
    """The dtype of the activations. On a CPU, "auto" means bfloat16 for a float16 checkpoint, because the native backend has
    no float16."""
    if config.dtype != "auto":
        named: torch.dtype = getattr(torch, config.dtype)
        return named
    may_be_native = parallel.device.type == "cpu" and config.backend in ("auto", "native")
    return torch.bfloat16 if stored == torch.float16 and may_be_native else stored


def dtype_text(config: EngineConfig, plan: WeightPlan, stored: torch.dtype) -> str:
    """The plan for people, with the checkpoint's dtype where "auto" means another."""
    if config.dtype != "auto" or plan.dtype == dtype_name(stored):
        return str(plan)
    return str(plan).replace(plan.dtype, f"{plan.dtype} (the checkpoint is {dtype_name(stored)})", 1)
