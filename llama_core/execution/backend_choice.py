"""Which backend computes a model on a rank, and in which formats that backend holds the weights. Reads no weight."""

import logging
from collections.abc import Callable
from typing import Literal

import torch

from llama_core.checkpoint.source import GROUP, WeightReader
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.execution.dtypes import dtype_name, preferred_dtype
from llama_core.execution.fused import step_memory
from llama_core.execution.memory_budget import StepBytes
from llama_core.execution.native import backend as native
from llama_core.execution.native.build import Unavailable
from llama_core.execution.parallel import Parallel, smallest
from llama_core.execution.weight_formats.format import TorchMatrixType, find_weight_format
from llama_core.execution.weight_formats.registry import FUSED_ONLY
from llama_core.execution.weight_plan import WeightPlan, plan_weights
from llama_core.model_config import ModelConfig

log = logging.getLogger(__name__)

BackendKind = Literal["native", "fused", "torch"]


def choose(
    config: EngineConfig,
    model: ModelConfig,
    reader: WeightReader,
    parallel: Parallel,
    voters: Parallel | None = None,
) -> tuple[BackendKind, torch.dtype, WeightPlan]:
    """The backend of the whole group, the dtype of the activations, and the formats of the weights. Every rank calls this.

    voters: the ranks that agree on the backend, `parallel` if absent; a plan for a group that does not exist passes one rank.
    Raises ConfigError if the configured backend is unavailable.
    """
    dtype = preferred_dtype(config, reader.dtype, parallel)
    plan = plan_stored(config, model, reader, dtype, parallel)
    kind = choose_backend(config, model, dtype, plan, voters or parallel)
    if kind == "torch" and config.dtype == "auto" and dtype != reader.dtype:
        dtype = reader.dtype
        plan = plan_stored(config, model, reader, dtype, parallel)
    return kind, dtype, plan_held(kind, plan, parallel)


def plan_stored(
    config: EngineConfig, model: ModelConfig, reader: WeightReader, dtype: torch.dtype, parallel: Parallel
) -> WeightPlan:
    """The formats of the weights for activations of `dtype`, before it is known which of them the backend multiplies."""
    return plan_weights(model, reader.stored_format, config.quantization, dtype_name(dtype), parallel.world_size)


def choose_backend(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, plan: WeightPlan, parallel: Parallel
) -> BackendKind:
    """The backend of the whole group: all ranks use the same. Raises ConfigError if the configured one is unavailable."""
    for_torch = plan.is_plain or config.quantization == "auto"
    for_fused = for_torch or _fused_holds(plan)
    if config.backend == "torch" and config.kv_cache_dtype != "auto":
        raise ConfigError(f"kv_cache_dtype {config.kv_cache_dtype} needs the fused backend", param="kv_cache_dtype")
    if config.backend == "torch" and config.batch_invariant:
        raise ConfigError("batch_invariant needs the native or the fused backend, not torch", param="batch_invariant")
    if config.backend == "fused" or config.backend == "torch":
        if not (for_fused if config.backend == "fused" else for_torch):
            backends = "fused" if config.quantization in FUSED_ONLY else "native or fused" if for_fused else "native"
            raise ConfigError(f"quantization {config.quantization} needs the {backends} backend", param="quantization")
        return config.backend
    reason = ""
    try:
        native.check_available(config, model, dtype, plan, parallel)
    except Unavailable as error:
        reason = str(error)
    available = bool(smallest(parallel, not reason))
    if available:
        return "native"
    reason = reason or "another rank cannot use it"
    if config.backend == "native":
        raise ConfigError(f"the native backend cannot be used: {reason}", param="backend")
    if for_fused and parallel.device.type == "cuda":
        return "fused"
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"kv_cache_dtype {config.kv_cache_dtype} needs a GPU, or backend: fused, which is slow on a CPU",
            param="kv_cache_dtype",
        )
    if config.quantization in FUSED_ONLY:
        raise ConfigError(
            f"quantization {config.quantization} needs a GPU, or backend: fused, which is slow on a CPU",
            param="quantization",
        )
    if not for_torch:
        raise ConfigError(
            f"quantization {config.quantization} needs the native backend, which cannot be used: {reason}",
            param="quantization",
        )
    if config.batch_invariant:
        raise ConfigError(
            f"batch_invariant needs the native backend, which cannot be used: {reason}", param="batch_invariant"
        )
    log.warning("rank %d computes with torch, several times slower than the native backend: %s", parallel.rank, reason)
    return "torch"


def step_bytes_of(kind: str) -> StepBytes:
    """The backend's function that states a step's working memory before the backend is made."""
    if kind == "torch":
        from llama_core.execution.reference.backend import step_bytes

        return step_bytes
    return native.step_bytes if kind == "native" else step_memory.step_bytes


def holds(kind: str, plan: WeightPlan) -> bool:
    """Whether such a backend multiplies every matrix in its format."""
    return kind == "native" or plan.is_plain or (kind == "fused" and _fused_holds(plan))


def _fused_holds(plan: WeightPlan) -> bool:
    """Whether the fused backend multiplies matrices in these formats."""
    return all(find_weight_format(name).torch_matrix is not None for name in plan.formats)


def matrix_types(plan: WeightPlan) -> Callable[[str], TorchMatrixType]:
    """The types of the fused backend's matrices by their names. `_fused_holds` must be true of the plan."""

    def matrix_type(name: str) -> TorchMatrixType:
        found = find_weight_format(plan.matrices[name]).torch_matrix
        assert found is not None
        return found

    return matrix_type


def plan_held(kind: str, plan: WeightPlan, parallel: Parallel) -> WeightPlan:
    """The plan with which the backend holds the weights. Logs what is expanded."""
    if plan.expanded and parallel.rank == 0:
        log.warning(
            "%d matrices that are stored quantized are held in %s: the parts of %d ranks cut through groups of %d inputs: %s%s",
            len(plan.expanded),
            ", ".join(dict.fromkeys(plan.matrices[name] for name in plan.expanded)),
            parallel.world_size,
            GROUP,
            ", ".join(plan.expanded[:4]),
            ", ..." if len(plan.expanded) > 4 else "",
        )
    if holds(kind, plan):
        return plan
    if parallel.rank == 0:
        log.warning("the %s backend expands weights to %s that are stored as %s", kind, plan.dtype, plan)
    return plan.expand()
