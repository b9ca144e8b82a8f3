"""Steps on a GPU. A decode step is one CUDA graph, sampling included; the host reads its tokens while the next step runs."""

import logging
import math
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch

from llama_core.checkpoint.rank_share import RankShare
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.execution.backend import NOT_FINITE, NOTHING_ALLOWED, Sampled, StepMasks
from llama_core.execution.fused.device_slots import DeviceSlots
from llama_core.execution.fused.model import FusedTransformer
from llama_core.execution.fused.ops import Ops, TorchOps
from llama_core.execution.fused.step_plan import StepBuffers, StepPlan, StepShape, split_size
from llama_core.execution.kv_cache import CacheShape, KVCache
from llama_core.execution.logit_rules import edit_logits
from llama_core.execution.parallel import Parallel, before_leaving, smallest
from llama_core.execution.sampling import sample_sorted
from llama_core.model_config import ModelConfig
from llama_core.scheduling.step import Pending, Row

log = logging.getLogger(__name__)

Result = TypeVar("Result")
# What sampling ends with: the most likely tokens, sampled tokens, or logits, which rules or grammars change afterwards.
Mode = Literal["greedy", "sampled", "logits"]
# Steps whose outputs may wait to be read. The driver keeps two in flight.
_TURNS = 4
# Tokens of steps with prompts that are captured. The launches of larger ones take less time than the GPU.
_CAPTURED_PROMPT_TOKENS = (32, 64, 128, 256, 512)
# Temporary memory for each logit: softmax, sort (values, int64 ids, scratch) and two cumulative sums (one double).
_BYTES_PER_LOGIT = 56


def ops_for(device: torch.device) -> Ops:
    """The Triton kernels on a GPU, the operations in torch elsewhere. Raises ConfigError where Triton does not work."""
    if device.type != "cuda":
        return TorchOps()
    try:
        from llama_core.execution.fused.kernels import TritonOps

        ops = TritonOps()
        ops.gated_silu(torch.zeros((1, 2), device=device))  # builds Triton's launcher, which needs a C compiler
    except Exception as error:  # any error of Triton, the compiler or the file system
        # In torch, attention would gather whole block tables, for which no memory is planned.
        raise ConfigError(
            f"Triton does not work here ({error}): install a C compiler and Python's headers, or give backend: torch",
            param="backend",
        ) from error
    return ops


def bucket_sizes(largest: int) -> list[int]:
    """Tokens of the decode steps that are captured: powers of two up to 32, then steps of 32, and `largest` itself."""
    sizes = {1 << i for i in range(6)} | set(range(32, largest, 32)) | {largest}
    return sorted(size for size in sizes if size <= largest)


def step_bytes(config: EngineConfig, model: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> int:
    """Of the largest step: activations, the parts of attention that are combined afterwards, and sampling."""
    share = RankShare.of(model, parallel.rank, parallel.world_size)
    rows, splits = config.max_step_samples, -(-config.max_seq_len // split_size(config.max_seq_len))
    n_heads, n_kv_heads = len(share.heads), len(share.kv_heads)
    heads = n_heads + 2 * n_kv_heads
    activations = config.max_step_tokens * (5 * model.dim + 2 * heads * model.head_dim + 3 * len(share.hidden))
    partial = rows * n_heads * splits * (model.head_dim + 1) * 4
    # Sampling, in the memory of the graphs and outside of it, and the logits of the latest step.
    logits = rows * config.vocab_size * (2 * _BYTES_PER_LOGIT + 4)
    return activations * dtype.itemsize + 2 * partial + logits


class FusedBackend:
    """Each step is a body, the Transformer's layers over all rows together, and a head, which computes logits and samples.

    Both are CUDA graphs where a bucket holds the step. All that a step needs from the host comes in one copy.
    """

    def __init__(
        self, config: EngineConfig, model: FusedTransformer, parallel: Parallel, slots: DeviceSlots, ops: Ops
    ) -> None:
        self.model = model
        self._config = config
        self._parallel = parallel
        self._slots = slots
        self._ops = ops
        self._device = parallel.device
        self._on_gpu = parallel.device.type == "cuda"
        self._cache_shape = CacheShape.of(model.config, config.block_size, parallel, model.dtype)
        self._cache: KVCache | None = None
        self._split_size = split_size(config.max_seq_len)
        self._tile_sizes = ops.tile_sizes(model.n_heads, model.n_kv_heads, model.head_dim, model.dtype)
        max_samples = config.max_step_samples
        self._sample_buckets = bucket_sizes(max_samples)
        self._decode_shapes = [StepShape(size, size, 0) for size in self._sample_buckets]
        self._mixed_shapes = [
            StepShape.of_bucket(size, max_samples, self._tile_sizes.chunk)
            for size in _CAPTURED_PROMPT_TOKENS
            if size <= config.max_step_tokens
        ]
        self._bodies: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._heads: dict[tuple[int, Mode], _Head] = {}
        self._spare_slot = config.max_batch_size
        largest = StepShape.of_bucket(config.max_step_tokens, max_samples, self._tile_sizes.chunk)
        # Room for the changes of slots that most steps bring, such as a long prompt's tokens and their places.
        max_size = largest.size + 4 * config.max_seq_len
        self._buffers = StepBuffers(max_samples, max_size, self._spare_slot, _TURNS, self._device)
        # Graphs write to these, so they stay in place.
        self._hidden_states = torch.zeros(
            (config.max_step_tokens, model.config.dim), dtype=model.dtype, device=self._device
        )
        self._logits = torch.empty((max_samples, config.vocab_size), dtype=torch.float32, device=self._device)
        self._turn = 0
        # Page-locked, because a copy from the device to other memory would block the host.
        self._answers = torch.zeros((_TURNS, max_samples), dtype=torch.int64, pin_memory=self._on_gpu)

    @property
    def name(self) -> str:
        num_graphs = len(self._bodies) + len(self._heads)
        return "fused" + (f", {num_graphs} CUDA graphs" if num_graphs else "")

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def cache_block_bytes(self) -> int:
        return self._cache_shape.block_bytes

    @property
    def working_bytes(self) -> int:
        return self._allocated_bytes + self.unallocated_bytes(self._config.max_seq_len)

    @property
    def _allocated_bytes(self) -> int:
        return self._logits.nbytes + self._hidden_states.nbytes

    def unallocated_bytes(self, max_seq_len: int) -> int:
        config = replace(self._config, max_seq_len=max_seq_len)
        need = step_bytes(config, self.model.config, self._parallel, self.model.dtype)
        return need - self._allocated_bytes

    @property
    def seconds_waited(self) -> None:
        return None

    def allocate_cache(self, num_blocks: int) -> None:
        # Padding tokens of a bucket write to one more block, which only the spare slot has.
        self._cache = KVCache(self._cache_shape, num_blocks + 1, self._device)
        self._slots.block_tables[self._spare_slot].fill_(num_blocks)
        if self._on_gpu:
            _have_graphs.add(self)
            before_leaving(_release_all_graphs)
            with torch.inference_mode():
                self._capture()

    def start(self, rows: Seq[Row], *, keep_logits: bool, masks: StepMasks | None = None) -> Pending[Sampled]:
        """Queue the step on the device. The next step uses its samples at once; the host reads them later."""
        plan = StepPlan.of(rows, self._tile_sizes)
        shape = self._bucket_of(plan.shape)
        changes = self._slots.take_changes()
        sent = self._buffers.send(
            self._turn, plan, shape, [part for change in changes for part in (change.places, change.values)]
        )
        self._slots.apply(changes, sent)
        body = self._bodies.get(shape)
        if body is None:
            self._compute(shape)
        else:
            body.replay()
        if not plan.num_samples:
            return self._read_later(torch.empty(0, dtype=torch.int64, device=self._device))
        return self._read_later(self._start_sampling(plan, masks))

    def logits_of_samples(self, samples: Seq[int]) -> torch.Tensor:
        return self._logits[list(samples)]

    def logits_of_tokens(self, tokens: range) -> torch.Tensor:
        return self.model.logits(self._hidden_states[tokens.start : tokens.stop])

    def _bucket_of(self, shape: StepShape) -> StepShape:
        """The smallest bucket that holds a step of this shape, else the shape itself."""
        buckets = self._mixed_shapes if shape.chunk_tiles else self._decode_shapes
        return next((bucket for bucket in buckets if bucket.holds(shape)), shape)

    def _compute(self, shape: StepShape) -> None:
        """The layers of the step that was sent, into `_hidden_states`. Nothing waits for the host or depends on a value."""
        assert self._cache is not None, "allocate_cache comes first"
        cache, ops, block_size, block_tables = self._cache, self._ops, self._config.block_size, self._slots.block_tables
        step = self._buffers.tensors(shape)
        blocks = block_tables[step.slots, step.positions // block_size]

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            window = self.model.config.window(layer)
            cached = cache.keys[layer], cache.values[layer]
            return ops.attend(q, *cached, block_tables, step.tiles, self._split_size, window)

        tokens = self._slots.tokens[step.slots, step.positions]
        slot_mapping = blocks * block_size + step.positions % block_size
        self._hidden_states[: shape.tokens] = self.model.hidden_states(
            tokens, step.positions, slot_mapping, cache, attend
        )

    def _start_sampling(self, plan: StepPlan, masks: StepMasks | None) -> torch.Tensor:
        """The step's samples, int64 [S], NOT_FINITE or NOTHING_ALLOWED where there is none."""
        slots, count = plan.samples[1].tolist(), plan.num_samples
        bucket = next(size for size in self._sample_buckets if size >= count)
        mode = self._mode(slots, masks)
        captured = self._heads.get((bucket, mode))
        if captured is None:
            result = self._sample(bucket, mode)
        else:
            captured.graph.replay()
            result = captured.result
        if mode != "logits":
            return result[:count]
        samples = list(zip(slots, plan.samples[2].tolist(), strict=True))
        return self._sample_edited(samples, result[:count], masks)

    def _mode(self, slots: Seq[int], masks: StepMasks | None) -> Mode:
        """How a step samples for these slots."""
        if masks is not None or any(self._slots.rules[slot] is not None for slot in slots):
            return "logits"
        return "greedy" if all(self._slots.is_greedy[slot] for slot in slots) else "sampled"

    def _sample(self, bucket: int, mode: Mode) -> torch.Tensor:
        """The samples of the step that was sent: tokens int64 [bucket], or logits float32 [bucket, vocab], which stay until the
        next step. No operation waits for the host or depends on a value."""
        samples = self._buffers.samples(bucket)
        logits = self._logits[:bucket]
        logits.copy_(self.model.logits(self._hidden_states[samples.tokens]))
        if mode == "logits":
            return logits
        finite = logits.sum(-1).isfinite()
        usable = torch.where(finite[:, None], logits, 0.0)
        if mode == "greedy":
            tokens = usable.argmax(-1)
        else:
            tokens = sample_sorted(usable, self._slots.sampling.at(samples.slots), samples.positions)
        # Ranks may differ in the last bit of a logit: rank 0 samples for all.
        self._parallel.broadcast(tokens)
        self._slots.tokens[samples.slots, samples.positions] = tokens
        return torch.where(finite, tokens, NOT_FINITE)

    def _sample_edited(
        self, samples: Seq[tuple[int, int]], logits: torch.Tensor, masks: StepMasks | None
    ) -> torch.Tensor:
        """Like `_sample` for these slots and positions, after the rules and grammars of their slots have changed the logits.

        The host waits for `masks`, and the device for the host.
        """
        slots, (_, index, positions) = self._slots, self._buffers.samples(len(samples))
        finite = logits.sum(-1).isfinite()
        edited = edit_logits(torch.where(finite[:, None], logits, 0.0), samples, slots.rules, slots.tokens, masks)
        allowed = edited.amax(-1) > -math.inf
        usable = torch.where(allowed[:, None], edited, 0.0)
        tokens = sample_sorted(usable, slots.sampling.at(index), positions)
        tokens = torch.where(allowed, tokens, NOTHING_ALLOWED).where(finite, NOT_FINITE)
        self._parallel.broadcast(tokens)
        slots.tokens[index, positions] = tokens.clamp(min=0)
        return tokens

    def _read_later(self, tokens: torch.Tensor) -> Pending[Sampled]:
        answer = self._answers[self._turn, : len(tokens)]
        self._turn = (self._turn + 1) % _TURNS
        answer.copy_(tokens, non_blocking=True)
        copied = None
        if self._on_gpu:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()

        def read() -> Sampled:
            if copied is not None:
                copied.synchronize()
            return Sampled.of(answer.tolist())

        return Pending(read, copied.query if copied is not None else lambda: True)

    def _capture(self) -> None:
        """A graph for each bucket; largest first, so that the others fit into its memory.

        Captured steps compute nothing in attention and write to slot 0, while the cache is empty. If the capture fails on any
        rank, all ranks run without graphs, which is slower.
        """
        shapes = [*reversed(self._mixed_shapes), *reversed(self._decode_shapes)]
        heads: list[tuple[int, Mode]] = [
            (bucket, mode) for bucket in reversed(self._sample_buckets) for mode in get_args(Mode)
        ]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # The first run, on a separate stream as torch requires, compiles kernels and opens NCCL's channels. Ranks communicate
        # in these steps, so an error here fails the start of all ranks.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            largest = StepShape.of_bucket(
                self._config.max_step_tokens, self._config.max_batch_size, self._tile_sizes.chunk
            )
            for shape in (largest, *shapes):
                self._compute(shape)
            for bucket, mode in heads:
                self._sample(bucket, mode)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        failed = ""
        try:
            with torch.cuda.stream(torch.cuda.current_stream()):  # restores the stream after a failed capture
                for shape in shapes:
                    self._bodies[shape], _ = _captured(partial(self._compute, shape), pool, stream)
                for bucket, mode in heads:
                    self._heads[bucket, mode] = _Head(*_captured(partial(self._sample, bucket, mode), pool, stream))
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
        if not smallest(self._parallel, not failed):
            self._release_graphs()
            log.warning("steps run without CUDA graphs, which is slower: %s", failed or "another rank failed")

    def _release_graphs(self) -> None:
        torch.cuda.synchronize()
        self._bodies.clear()
        self._heads.clear()


_have_graphs: weakref.WeakSet[FusedBackend] = weakref.WeakSet()


def _release_all_graphs() -> None:
    """NCCL destroys no group while graphs exist that its collectives are part of (pytorch#115388)."""
    for backend in list(_have_graphs):
        backend._release_graphs()


@dataclass(frozen=True, slots=True)
class _Head:
    graph: torch.cuda.CUDAGraph
    result: torch.Tensor  # written by each replay: tokens int64 [bucket], or logits float32 [bucket, vocab]


def _captured(run: Callable[[], Result], pool: Any, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Result]:
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog queries its events from another thread, which must not end the capture.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = run()
    return graph, result
