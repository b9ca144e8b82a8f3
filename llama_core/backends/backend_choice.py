"""Which backend computes a model on a rank, in which dtype, and in which formats that backend holds the weights. Reads no
weight."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from llama_core.backends.fused import step_memory
from llama_core.backends.memory_budget import StepBytes
from llama_core.backends.native import backend as native
from llama_core.backends.native.build import Unavailable
from llama_core.backends.parallel import Parallel, smallest
from llama_core.backends.weight_formats.format import TorchMatrixType
from llama_core.backends.weight_formats.matrices import find_weight_format
from llama_core.backends.weight_plan import WeightPlan, plan_weights
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.files.source import WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.weight_formats import CODINGS, PORTABLE

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
    if reader.ignored and parallel.rank == 0:
        log.info("activations and cache are not quantized as the files say (%s)", ", ".join(reader.ignored))
    if reader.of_images and parallel.rank == 0:
        log.info("text is served and no image: %s of the files are not loaded", ", ".join(reader.of_images))
    dtype = preferred_dtype(config, reader.dtype, parallel)
    plan = plan_stored(config, model, reader, dtype, parallel, "native")
    kind = choose_backend(config, model, dtype, plan, voters or parallel)
    if kind == "torch" and config.dtype == "auto" and dtype != reader.dtype:
        dtype = reader.dtype
    if kind != "native":
        plan = plan_stored(config, model, reader, dtype, parallel, kind)
    return kind, dtype, plan_held(kind, config, plan, parallel)


def plan_stored(
    config: EngineConfig,
    model: ModelConfig,
    reader: WeightReader,
    dtype: torch.dtype,
    parallel: Parallel,
    kind: BackendKind,
) -> WeightPlan:
    """The formats of the weights for activations of `dtype`. The native engine multiplies codings by bfloat16, and holds what
    has none in 8 bits."""
    name, has_all = dtype_name(dtype), kind == "native" and dtype == torch.bfloat16
    codings, rest = (CODINGS, "int8_groups") if has_all else (PORTABLE, name)
    return plan_weights(model, reader.stored_format, config.quantization, name, parallel.world_size, codings, rest)


def choose_backend(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, plan: WeightPlan, parallel: Parallel
) -> BackendKind:
    """The backend of the whole group: all ranks use the same. Raises ConfigError if the configured one is unavailable."""
    is_gpu = parallel.device.type == "cuda"
    if config.backend == "fused" and model.n_experts and is_gpu:
        raise ConfigError("the fused backend has no experts yet: give backend: torch", param="backend")
    if config.backend == "fused" or config.backend == "torch":
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
    if is_gpu:
        return "torch" if model.n_experts else "fused"
    for name, are_usual in (("kv_cache_dtype", ("auto",)), ("quantization", ("auto", "none"))):
        if (value := getattr(config, name)) not in are_usual:
            raise ConfigError(
                f"{name} {value} needs a GPU, or the native backend, which cannot be used ({reason}); backend: torch has it "
                "on any device, and is slow",
                param=name,
            )
    if config.batch_invariant:
        raise ConfigError(
            f"batch_invariant needs the native backend, which cannot be used: {reason}", param="batch_invariant"
        )
    log.warning("rank %d computes with torch, several times slower than the native backend: %s", parallel.rank, reason)
    return "torch"


def step_bytes_of(kind: str, device: torch.device) -> StepBytes:
    """The backend's function that states a step's working memory before the backend is made."""
    if kind == "native":
        return native.step_bytes
    return partial(step_memory.step_bytes, is_eager=kind != "fused" or device.type != "cuda")


def holds(kind: str, config: EngineConfig, plan: WeightPlan) -> bool:
    """Whether such a backend holds every matrix in its format. In torch each product expands quantized weights, which is done
    once where nobody asked for the format."""
    return kind != "torch" or config.quantization != "auto" or plan.is_plain


def matrix_types(plan: WeightPlan) -> Callable[[str], TorchMatrixType]:
    """The types of the matrices in torch and Triton, by their names."""
    return lambda name: find_weight_format(plan.matrices[name]).torch_matrix


def plan_held(kind: str, config: EngineConfig, plan: WeightPlan, parallel: Parallel) -> WeightPlan:
    """The plan with which the backend holds the weights. Logs what is expanded."""
    for origin in dict.fromkeys(plan.expanded.values()) if parallel.rank == 0 else ():
        matrices = [matrix for matrix, stored in plan.expanded.items() if stored == origin]
        cut = f": the parts of {parallel.world_size} ranks cut through groups of inputs"
        log.warning(
            "%d matrices that are stored as %s are held in %s%s: %s%s",
            len(matrices),
            origin,
            plan.matrices[matrices[0]],
            cut if origin in CODINGS and parallel.world_size > 1 else "",
            ", ".join(matrices[:4]),
            ", ..." if len(matrices) > 4 else "",
        )
    if holds(kind, config, plan):
        return plan
    if parallel.rank == 0:
        log.warning("the %s backend expands weights to %s that are stored as %s", kind, plan.dtype, plan)
    return plan.expand()


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
