"""The backend in C++: one call of the library computes a step from its rows to the sampled tokens."""

import ctypes
import logging
import math
import os
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from llama_core.backends.backend import Sampled
from llama_core.backends.memory_budget import adapter_bytes
from llama_core.backends.native.all_gather import GlooFallback, shared_memory
from llama_core.backends.native.build import Unavailable
from llama_core.backends.native.library import Shape, Slots, TokenMask, load_library
from llama_core.backends.native.program import NativeModel
from llama_core.backends.parallel import Parallel
from llama_core.backends.rotary import rotary_table
from llama_core.backends.slots import SlotTable
from llama_core.backends.weight_plan import WeightPlan
from llama_core.config import EngineConfig
from llama_core.grammar.masks import GrammarMasks
from llama_core.model.config import ModelConfig
from llama_core.model.operations import Route
from llama_core.model.share import SAMPLING_RANK, RankShare
from llama_core.scheduling.step import Pending, Row
from llama_core.weights.adapter import LowRank
from llama_core.weights.loader import GroupedWeight

log = logging.getLogger(__name__)

_FIXED_BYTES = 2**20  # of the engine: sums of its threads, and pages that are not full
_LANES = 16  # floats of a vector; also positions of a KV tile of the cache


def check_available(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, plan: WeightPlan, parallel: Parallel
) -> None:
    """Raises Unavailable unless this rank can run such a model natively."""
    if parallel.device.type != "cpu":
        raise Unavailable(f"the device is {parallel.device.type}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise Unavailable(f"it computes in float32 and bfloat16, not in {dtype}")
    if config.kv_cache_dtype != "auto":
        raise Unavailable(f"it has no cache in {config.kv_cache_dtype}")
    if config.block_size % _LANES:
        raise Unavailable(f"block_size {config.block_size} is not a multiple of {_LANES}")
    if min(model.dim, model.hidden_dim, model.vocab_size) < parallel.world_size:
        raise Unavailable(f"a dimension of the model is smaller than its {parallel.world_size} ranks")
    widest = max(model.dim, model.hidden_dim, model.expert_dim, model.shared_dim, model.query_width)
    is_bfloat16 = dtype == torch.bfloat16
    for weight_format in plan.formats:
        unsupported = load_library().llama_unsupported_reason
        if reason := unsupported(model.head_dim, widest, is_bfloat16, weight_format.encode()):
            raise Unavailable(reason.decode())


def _shape(config: EngineConfig, model: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> Shape:
    share = RankShare.of(model, parallel.rank, parallel.world_size)
    return Shape(
        dim=model.dim,
        layers=len(share.layers),
        heads=len(share.heads),
        kv_heads=len(share.kv_heads),
        head_dim=model.head_dim,
        full_heads=model.n_heads,
        full_kv_heads=model.n_kv_heads,
        has_first_copies=share.has_first_copies(model),
        tables=len(model.angles),
        hidden=len(share.hidden),
        full_vocab=model.vocab_size,
        rank=parallel.rank,
        ranks=parallel.world_size,
        sampler=SAMPLING_RANK,
        bfloat16=dtype == torch.bfloat16,
        max_tokens=config.max_step_tokens,
        max_samples=config.max_step_samples,
        max_seq_len=config.max_seq_len,
        block_size=config.block_size,
        blocks_per_sequence=config.blocks_per_sequence,
        threads=torch.get_num_threads(),
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        embedding_multiplier=model.embedding_multiplier,
        logits_divisor=model.logits_divisor,
        logits_cap=model.logits_cap or 0.0,
    )


def _token_masks(masks: GrammarMasks) -> "ctypes.Array[TokenMask]":
    """The C structs of all samples."""
    bits, ready = masks.bits, masks.is_ready
    first_bits, first_ready = bits.ctypes.data, ready.ctypes.data
    each = (
        TokenMask(first_bits + i * bits.strides[0] if masked else None, first_ready + i * ready.strides[0])
        for i, masked in enumerate(masks.has_mask)
    )
    return (TokenMask * len(masks.has_mask))(*each)


def step_bytes(config: EngineConfig, model: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> int:
    """Rather more than the engine's buffers: activations as float32, logits, the rotary table, and this rank's part of the
    memory that all ranks share. Each attends in the cache, in place."""
    share = RankShare.of(model, parallel.rank, parallel.world_size)
    heads = 3 * len(share.heads) + 2 * len(share.kv_heads)  # with gates
    head_dim = -(-model.head_dim // _LANES) * _LANES
    hidden = len(share.hidden) + len(share.shared_hidden)
    shrunk = 4 * (config.max_lora_rank + 4) if config.max_loras else 0  # of q, k, v and gates by an adapter
    widths = shrunk + 5 * (model.dim + _LANES) + 2 * heads * head_dim + 4 * (hidden + _LANES)
    chosen = max((each.top_k for layer in model.layers for each in layer if isinstance(each, Route)), default=0)
    rows = chosen * config.max_step_tokens + _LANES * min(model.n_experts, chosen * config.max_step_tokens)
    experts = rows * 3 * (model.dim + len(share.expert_hidden) + 2 * _LANES) + config.max_step_tokens * model.n_experts
    logits = 2 * config.max_step_samples * (model.vocab_size + model.dim)
    rotary = 2 * config.max_seq_len * head_dim * len(model.angles)
    shared = 0
    if parallel.world_size > 1:
        shared = load_library().llama_shared_bytes(_shape(config, model, parallel, dtype)) // parallel.world_size
    adapters = adapter_bytes(config, model, share, dtype)
    return 4 * (config.max_step_tokens * widths + experts + logits + rotary) + adapters + _FIXED_BYTES + int(shared)


def planned_bytes(
    config: EngineConfig, model: ModelConfig, parallel: Parallel, dtype: torch.dtype, plan: WeightPlan, num_threads: int
) -> tuple[int, int]:
    """The bytes of this rank's weights, and of its engine's buffers with its part of the memory that all ranks share.

    Makes an engine and asks it: its memory is reserved, but no page of it is written. Raises MemoryError.
    """
    native = load_library()
    shape = _shape(config, model, parallel, dtype)
    shape.threads = num_threads
    held = NativeModel(model, RankShare.of(model, parallel.rank, parallel.world_size), plan.matrices)
    rotary = torch.zeros(len(model.angles), config.max_seq_len, model.head_dim)
    engine = native.llama_create(shape, *held.arguments, Slots(), rotary.data_ptr(), None)
    if not engine:
        raise MemoryError("the native engine could not be made: no memory, or no threads")
    try:
        shared = native.llama_shared_bytes(shape) // parallel.world_size if parallel.world_size > 1 else 0
        return int(native.llama_weight_bytes(engine)), int(native.llama_working_bytes(engine)) + int(shared)
    finally:
        native.llama_destroy(engine)


class NativeBackend:
    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        parallel: Parallel,
        slots: SlotTable,
        dtype: torch.dtype,
        plan: WeightPlan,
        weights: Iterable[tuple[str, torch.Tensor | GroupedWeight]],
    ) -> None:
        """`weights`: this rank's part of each, in `dtype` or in groups. The engine packs each as it is read.

        Raises MemoryError.
        """
        self._native = load_library()
        self._plan = plan
        self._slots = slots  # the engine keeps pointers to its tensors
        self._num_slots, self._max_seq_len = slots.tokens.shape
        share = RankShare.of(model, parallel.rank, parallel.world_size)
        self._shape = _shape(config, model, parallel, dtype)
        threads = self._shape.threads
        tables = [rotary_table(each, model.head_dim, config.max_seq_len, parallel.device) for each in model.angles]
        rotary = torch.stack(tables) if tables else torch.empty(0)
        arrays = Slots(
            slots.tokens.data_ptr(),
            slots.block_tables.data_ptr(),
            slots.sampling.address,
            slots.rule_addresses.data_ptr(),
            slots.adapter_places.data_ptr(),
        )
        cpus = sorted(os.sched_getaffinity(0))
        pins = (ctypes.c_int32 * threads)(*cpus) if len(cpus) == threads else None
        self._model = NativeModel(model, share, plan.matrices)
        self._engine = self._native.llama_create(self._shape, *self._model.arguments, arrays, rotary.data_ptr(), pins)
        if not self._engine:
            raise MemoryError("the native engine could not be made: no memory, or no threads")
        if parallel.world_size > 1:
            self._connect(parallel)
        for name, weight in weights:
            self._pack(name, weight)
        self._sampled = torch.empty(config.max_step_samples, dtype=torch.int64)
        self._mask_wait_s = 0.0  # of all steps
        buffer = (ctypes.c_float * (config.max_step_samples * model.vocab_size)).from_address(
            self._native.llama_logits(self._engine)
        )
        self._logits = torch.frombuffer(buffer, dtype=torch.float32).view(config.max_step_samples, model.vocab_size)

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self._native.llama_destroy(self._engine)

    @property
    def name(self) -> str:
        return f"native, {self._native.llama_instructions().decode()}"

    @property
    def weight_bytes(self) -> int:
        return int(self._native.llama_weight_bytes(self._engine))

    @property
    def working_bytes(self) -> int:
        shared = self._native.llama_shared_bytes(self._shape) if self._shape.ranks > 1 else 0
        return int(self._native.llama_working_bytes(self._engine)) + int(shared)

    def unallocated_bytes(self, max_seq_len: int) -> int:
        """The engine's own buffers, whose pages exist when they are first written. The shared memory exists already."""
        return int(self._native.llama_working_bytes(self._engine))

    @property
    def cache_block_bytes(self) -> int:
        shape = self._shape
        head_dim = math.ceil(shape.head_dim / _LANES) * _LANES
        return int(2 * shape.layers * shape.block_size * shape.kv_heads * head_dim * (2 if shape.bfloat16 else 4))

    @property
    def seconds_waited(self) -> float:
        return float(self._native.llama_waited(self._engine))

    @property
    def seconds_sampled(self) -> float:
        return float(self._native.llama_seconds_sampled(self._engine))

    def allocate_cache(self, num_blocks: int) -> None:
        if self._native.llama_make_cache(self._engine, num_blocks):
            raise MemoryError(f"a cache of {num_blocks * self.cache_block_bytes} bytes could not be allocated")

    def load_adapter(self, place: int, pairs: Iterable[LowRank]) -> None:
        self._native.llama_clear_adapter(self._engine, place)
        for name, a, b, scale in pairs:
            part, a, b = self._model.part(name, (len(b), a.shape[1])), a.float(), b.float()
            pointers = a.data_ptr(), b.data_ptr()
            self._native.llama_pack_adapter(self._engine, place, part, len(a), scale, *pointers)

    def start(self, rows: Seq[Row], *, keep_logits: bool, masks: GrammarMasks | None = None) -> Pending[Sampled]:
        flat: list[int] = []
        count = num_tokens = 0
        for slot, start, length, samples, num_drafts in rows:
            num_samples = 1 + num_drafts if samples else 0
            flat += (slot, start, length, num_samples)
            count += num_samples
            num_tokens += length
            if not (0 <= slot < self._num_slots and start >= 0 and start + length + samples <= self._max_seq_len):
                raise ValueError(f"row {(slot, start, length, samples)} is out of bounds")
        # The engine does not check bounds, and `python -O` removes asserts, so these checks raise.
        if count > self._shape.max_samples or num_tokens > self._shape.max_tokens:
            raise ValueError(f"a step of {num_tokens} tokens and {count} samples is too large")
        array = (ctypes.c_int32 * len(flat))(*flat)
        token_masks = None if masks is None else _token_masks(masks)
        failed = self._native.llama_step(
            self._engine, array, len(rows), self._sampled.data_ptr(), keep_logits, token_masks
        )
        if failed:
            self._gloo_fallback.reraise()
        mask_wait_s = 0.0 if masks is None else self._latest_mask_wait_s()
        return Pending.done(Sampled.of(self._sampled[:count].tolist(), mask_wait_s))

    def _latest_mask_wait_s(self) -> float:
        """Seconds that the latest step has waited for its masks."""
        before_s, self._mask_wait_s = self._mask_wait_s, float(self._native.llama_waited_for_masks(self._engine))
        return self._mask_wait_s - before_s

    def queue_samples(self) -> None:
        """`start` has computed them."""

    def logits_of_samples(self, samples: Seq[int]) -> torch.Tensor:
        return self._logits[list(samples)]

    def logits_of_tokens(self, tokens: range) -> torch.Tensor:
        parts = []
        for begin in range(0, len(tokens), len(self._logits)):
            part = tokens[begin : begin + len(self._logits)]
            self._native.llama_logits_of(self._engine, (ctypes.c_int32 * len(part))(*part), len(part))
            parts.append(self._logits[: len(part)].clone())
        return torch.cat(parts)

    def hidden_states_of_tokens(self, tokens: range) -> torch.Tensor:
        states = torch.empty(len(tokens), self._shape.dim)
        self._native.llama_hidden_states_of(self._engine, tokens.start, len(tokens), states.data_ptr())
        return states

    def _pack(self, name: str, weight: torch.Tensor | GroupedWeight) -> None:
        part = self._model.part(name, (weight.codes if isinstance(weight, GroupedWeight) else weight).shape)
        if isinstance(weight, GroupedWeight):
            codes, scales, minima = (part if part is None else part.contiguous() for part in weight)
            assert codes is not None and scales is not None
            if minima is None and self._plan.format_of(name) == "int4_min":
                minima = scales * -8  # scale * (code - 8) = scale * code - 8 scale
            address = None if minima is None else minima.data_ptr()
            self._native.llama_pack_groups(self._engine, part, codes.data_ptr(), scales.data_ptr(), address)
            return
        source = weight.contiguous()
        assert source.dtype in (torch.float32, torch.bfloat16)
        is_bfloat16 = source.dtype == torch.bfloat16
        self._native.llama_pack(self._engine, part, source.data_ptr(), is_bfloat16)

    def _connect(self, parallel: Parallel) -> None:
        memory = shared_memory(parallel, self._native.llama_shared_bytes(self._shape))
        if memory is not None:
            self._memory = memory  # mapped for the life of the engine
            self._native.llama_share_memory(self._engine, ctypes.addressof(ctypes.c_char.from_buffer(memory)))
            log.info("rank %d all-gathers with %d other ranks in shared memory", parallel.rank, parallel.world_size - 1)
            return
        self._gloo_fallback = GlooFallback(parallel)
        self._native.llama_use_fallback(self._engine, ctypes.cast(self._gloo_fallback.function, ctypes.c_void_p))
        log.info("rank %d all-gathers with %d other ranks by gloo", parallel.rank, parallel.world_size - 1)
