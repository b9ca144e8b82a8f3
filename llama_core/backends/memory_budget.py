"""Memory that a rank may still allocate, on its device or on its host."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from llama_core.backends.kv_cache import cache_dtype
from llama_core.backends.parallel import Parallel, ranks_with, smallest
from llama_core.backends.weight_formats.matrices import find_weight_format
from llama_core.backends.weight_plan import WeightPlan
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.host.memory import available_host_bytes, host_identity
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare
from llama_core.model.weights import OUTPUT, weight_specs
from llama_core.scheduling.sliding_window import SlidingWindow

CACHE_SHARE_OF_FREE = 0.5  # of the host memory that is free after loading; activations and other processes get the rest
# Of the memory planned for the cache before loading, what max_seq_len may count on: other processes allocate meanwhile.
CERTAIN_SHARE = 0.8
LEAST_CONTEXT = 512  # max_seq_len is not lowered further; a start that has less memory is refused with a remedy
# (configuration, model, rank, dtype) -> bytes that a step of that rank takes beside weights and cache. Each backend has one.
StepBytes = Callable[[EngineConfig, ModelConfig, Parallel, torch.dtype], int]
_LANES = 16  # the native backend pads heads to whole vectors
DEVICE_WAIT_S = 10.0  # for the memory of processes that ended: the driver frees it some time after they are gone
# Of what a rank takes according to its plan, what must be free before it loads: the plan holds within 3 %.
_PLANNED_SHARE = 0.97
_DEVICE_POLL_S = 0.05
GPU_HEADROOM = 0.1  # of the device's memory, left free for activations and the allocator


def planned_weight_bytes(config: ModelConfig, plan: WeightPlan, parallel: Parallel) -> int:
    """Bytes of this rank's weights, each in its format."""
    bytes_per_weight = {name: find_weight_format(name).bytes_per_weight for name in (plan.dtype, *plan.formats)}
    total = 0.0
    share = RankShare.of(config, parallel.rank, parallel.world_size)
    for name, spec in weight_specs(config).items():
        num_values = math.prod(spec.part(share).shape)
        total += num_values * bytes_per_weight[plan.format_of(name)]
    return math.ceil(total)


def adapter_bytes(config: EngineConfig, model: ModelConfig, share: RankShare, dtype: torch.dtype) -> int:
    """Bytes of this rank's places for LoRA adapters: of each, both matrices of every linear layer with the largest rank."""
    parts = (
        spec.part(share).shape for name, spec in weight_specs(model).items() if spec.takes_adapters and name != OUTPUT
    )
    rank = 4 * math.ceil(config.max_lora_rank / 4)  # as the native backend pads it
    return config.max_loras * rank * sum(map(sum, parts)) * dtype.itemsize


def check_weights_fit(num_bytes: int, parallel: Parallel, former_bytes: int = 0) -> None:
    """Raises ConfigError on every rank if the weights of any rank do not fit into the free memory of its device, or of its
    host together with those of the other ranks there. Every rank calls this before any rank allocates memory.

    former_bytes: what the rank that this one replaces took beside its weights. On a GPU, waits up to DEVICE_WAIT_S for the
    weights and, if a device of this size can have both, for the rest.

    Without this check the kernel would end a process to free memory, possibly another user's.
    """
    if parallel.device.type == "cuda":
        _, total = torch.cuda.mem_get_info(parallel.device)
        needed = int((num_bytes + former_bytes) * _PLANNED_SHARE)
        # Fewer ranks than before have larger shares of the weights, and no room for as large a cache.
        needed = max(num_bytes, needed) if needed <= total * (1 - GPU_HEADROOM) else num_bytes
        deadline = time.monotonic() + DEVICE_WAIT_S
        while (free := int(torch.cuda.mem_get_info(parallel.device)[0])) < needed and time.monotonic() < deadline:
            time.sleep(_DEVICE_POLL_S)
        num_sharing = 1
    else:
        num_sharing, free = len(ranks_with(parallel, host_identity())), available_host_bytes()
    fits = num_bytes * num_sharing <= free
    if not smallest(parallel, fits):
        need = f"{num_sharing} of {parallel.world_size} ranks here need {num_bytes:,} bytes each"
        raise ConfigError(
            f"the weights do not fit: {need}, {free:,} are free"
            + ("" if fits else ": use more ranks, or int8 or int4 weights"),
            param="model_parallel_size",
        )


def free_cache_bytes(parallel: Parallel, planned_bytes: int = 0) -> int:
    """Bytes that one rank may use for its cache if `kv_cache_bytes` is not set.

    planned_bytes: what this rank, and each other rank, will allocate before.
    """
    if parallel.device.type == "cuda":
        torch.cuda.empty_cache()  # loading's temporary tensors
        free, total = torch.cuda.mem_get_info(parallel.device)
        return max(0, free - int(total * GPU_HEADROOM) - planned_bytes)
    free_bytes = max(0, available_host_bytes() - planned_bytes * parallel.world_size)
    return int(free_bytes * CACHE_SHARE_OF_FREE) // parallel.world_size


def fit_context(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    plan_for: Callable[[int], WeightPlan],
    parallel: Parallel,
    step_bytes: StepBytes,
) -> EngineConfig:
    """The configuration with max_seq_len lowered to what every rank's memory holds, where it may be lowered; the same on every
    rank. Every rank calls this before any rank allocates memory.

    plan_for: the weights' formats on so many ranks. Where fewer ranks may replace failed ones, every rank of a group with one
    rank less must hold the context too, unless such a group cannot hold LEAST_CONTEXT.
    """
    if not config.lowers_max_seq_len:
        return config

    def on(*ranks: Parallel) -> int:
        parts = {at: RankShare.of(model, at.rank, at.world_size) for at in ranks}
        # Equal sizes need equal memory.
        distinct = {tuple(map(len, (p.heads, p.kv_heads, p.hidden, p.vocab, p.columns))): at for at, p in parts.items()}
        plan = plan_for(ranks[0].world_size)
        found = (_planned_context(config, model, dtype, plan, at, step_bytes) for at in distinct.values())
        return smallest(parallel, min(found))

    least = min(LEAST_CONTEXT, config.max_seq_len)
    longest = on(parallel)
    if config.serves_with_fewer_ranks and parallel.world_size > 1:
        fewer = parallel.world_size - 1
        # Any rank of the smaller group may be placed here.
        shrunk = on(*(replace(parallel, rank=rank, world_size=fewer) for rank in range(fewer)))
        longest = min(longest, shrunk) if shrunk >= least else longest
    return replace(config, max_seq_len=max(least, longest))


def longest_context(
    config: EngineConfig, model: ModelConfig, block_bytes: int, cache_bytes: Callable[[int], int]
) -> int:
    """The longest max_seq_len, at most the configured one, whose sequence fits into the cache; 0 if none does.

    block_bytes: of one block of the cache. cache_bytes: max_seq_len -> memory for the cache, less for longer contexts.
    """
    window = SlidingWindow.of(model.longest_window, config.block_size, config.max_step_tokens)
    fits, too_many = 0, config.blocks_per_sequence + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        length = min(middle * config.block_size, config.max_seq_len)
        if window.num_held(length) * block_bytes <= cache_bytes(length):
            fits = middle
        else:
            too_many = middle
    return min(fits * config.block_size, config.max_seq_len)


def _planned_context(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    plan: WeightPlan,
    at: Parallel,
    step_bytes: StepBytes,
) -> int:
    """The longest context for which the rank `at` would have memory on this host and device. Nothing is allocated yet."""
    free = free_cache_bytes(at, planned_weight_bytes(model, plan, at) + (config.kv_cache_bytes or 0))

    def cache_bytes(length: int) -> int:
        # Of a position: its angles in the rotary table and those that it is made from, its token and block in each slot.
        arrays = length * (12 * model.head_dim + 2 * 8 * (config.max_batch_size + 1))
        if config.kv_cache_bytes is not None:
            return config.kv_cache_bytes if arrays <= free else 0
        need = step_bytes(replace(config, max_seq_len=max(2, length)), model, at, dtype)
        return int((free - need) * CERTAIN_SHARE) - arrays

    block_bytes = model.n_layers * layer_block_bytes(config.block_size, model, cache_dtype(config, dtype), at)
    return longest_context(config, model, block_bytes, cache_bytes)


def layer_block_bytes(block_size: int, model: ModelConfig, dtype: torch.dtype, parallel: Parallel) -> int:
    """Bytes of the keys and values of one block in one layer on this rank. dtype: of the cache."""
    num_heads = len(RankShare.of(model, parallel.rank, parallel.world_size).kv_heads)
    return 2 * block_size * num_heads * -(-model.head_dim // _LANES) * _LANES * dtype.itemsize
