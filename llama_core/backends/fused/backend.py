"""Steps of the layers over `TorchOps`. On a GPU they are queued without waiting: the host reads a step's tokens while the
next step runs.
"""

import logging
import os
import sys
import time
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

import torch

from llama_core.backends.backend import Sampled
from llama_core.backends.fused.adapters import AdapterTables
from llama_core.backends.fused.buffers import DeviceSlots, Prefixes, StepBuffers
from llama_core.backends.fused.device import Event, StepDevice, Work
from llama_core.backends.fused.model import FusedTransformer
from llama_core.backends.fused.ops import NUM_SUMS
from llama_core.backends.fused.sampling.sampler import unpacked
from llama_core.backends.fused.sampling.sampling_head import SamplingHead
from llama_core.backends.fused.step_memory import received_size, unallocated_bytes
from llama_core.backends.fused.step_plan import LaunchShape, StepBuckets, StepPlan, plan_of
from llama_core.backends.kv_cache import CacheShape, KVCache, cache_dtype
from llama_core.backends.parallel import before_leaving, smallest
from llama_core.config import EngineConfig
from llama_core.grammar.masks import GrammarMasks
from llama_core.scheduling.step import Pending, Row
from llama_core.weights.adapter import LowRank

log = logging.getLogger(__name__)

# Steps whose outputs may wait to be read. The driver keeps two in flight.
_TURNS = 4
# For queued work when a rank leaves. torchrun kills a process 30 s after it asked it to end.
_LEAVE_LIMIT_S = 10.0
_LEAVE_POLL_S = 0.01


@dataclass(slots=True)
class _Step:
    """A step whose layers are queued. answer, logprobs: page-locked copies on the host, valid once the event `copied` is
    reached. copied: None before the sampling is queued. mask_wait_s: None where it is not measured, because a GPU computes
    the layers meanwhile."""

    turn: int
    plan: StepPlan
    masks: GrammarMasks | None
    keep_logits: bool
    answer: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    copied: Event | None = None
    mask_wait_s: float | None = None


class FusedBackend:
    """Each step is a body, the Transformer's layers over all rows together, and a head, which computes logits and samples.

    Both are CUDA graphs where a bucket holds the step. All that a step needs from the host comes in one copy.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: FusedTransformer,
        slots: DeviceSlots,
        device: StepDevice,
        name: str = "fused",
    ) -> None:
        self.model = model
        if config.max_loras:
            about = config, model.config, model.share, model.dtype, device.torch_device
            model.adapters = AdapterTables(*about)
        self._name = name
        self._config = config
        self._slots = slots
        self._device = device
        cached = cache_dtype(config, model.dtype)
        self._cache_shape = CacheShape.of(model.config, config.block_size, model.parallel, cached)
        self.cache_block_bytes = self._cache_shape.block_bytes
        self._cache: KVCache | None = None
        self._num_blocks = 0
        self.start_seconds = dict.fromkeys(("cache", "warm_up", "capture"), 0.0)
        self._tile_sizes = model.ops.tile_sizes(model.n_heads, model.n_kv_heads, model.head_dim, model.dtype)
        max_samples = config.max_step_samples
        self._buckets = StepBuckets(config, self._tile_sizes.chunk)
        self._bodies: dict[tuple[LaunchShape, bool], Work] = {}  # with and without adapters
        self._spare_slot = config.max_batch_size
        max_size = received_size(config, self._buckets.largest)
        self._buffers = StepBuffers(max_samples, max_size, self._spare_slot, _TURNS, device)
        # Graphs write to this tensor, so it stays in place. The largest bucket of decodes may be larger than any step.
        max_tokens = max(config.max_step_tokens, max_samples)
        self._hidden_states = torch.zeros((max_tokens, model.config.dim), dtype=model.dtype, device=device.torch_device)
        self._head = SamplingHead(config, model, slots, device, self._buffers, self._hidden_states, _TURNS)
        self._turn = 0
        self._unsampled: _Step | None = None
        self._answers = [Prefixes(answer) for answer in device.page_locked(_TURNS, NUM_SUMS + max_samples)]
        # Of the steps that were read. Any thread may read them.
        self._waited_s = self._mask_wait_s = self.seconds_sampled = 0.0
        self._logprobs = device.page_locked(_TURNS, max_samples, self._head.num_logprobs)

    @property
    def name(self) -> str:
        num_graphs = len(self._bodies) + self._head.num_graphs
        return self._name + (f", {num_graphs} CUDA graphs" if num_graphs else "")

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def working_bytes(self) -> int:
        holders = self._slots, self._buffers, self._head, self._hidden_states
        kept = self.model.kept_bytes + sum(each.nbytes for each in holders)
        return kept + self.unallocated_bytes(self._config.max_seq_len)

    def unallocated_bytes(self, max_seq_len: int) -> int:
        about = replace(self._config, max_seq_len=max_seq_len), self.model.config, self.model.parallel, self.model.dtype
        return unallocated_bytes(*about, is_eager=not self._device.captures)

    @property
    def seconds_waited(self) -> float:
        return self._waited_s + self._mask_wait_s

    def allocate_cache(self, num_blocks: int) -> None:
        begin = time.perf_counter()
        # Padding tokens of a bucket write to one more block, which only the spare slot has.
        self._cache = self._cache_shape.allocate(num_blocks + 1, self._device.torch_device)
        self._num_blocks = num_blocks
        self._slots.block_tables[self._spare_slot].fill_(num_blocks)
        self.start_seconds["cache"] = time.perf_counter() - begin
        if self._device.captures:
            _have_graphs.add(self)
            before_leaving(_release_all_graphs)
            with torch.inference_mode():
                self._capture()

    def load_adapter(self, place: int, pairs: Iterable[LowRank]) -> None:
        assert self.model.adapters is not None, "max_loras is 0"
        self._device.queue(partial(self.model.adapters.load, place, pairs))

    def start(self, rows: Seq[Row], *, keep_logits: bool, masks: GrammarMasks | None = None) -> Pending[Sampled]:
        """Queue the step on the device. The next step uses its samples at once; the host reads them later.

        The grammars' thread makes the masks from the samples of the step before, while the layers run. The step's sampling is
        queued when the masks are done and `is_ready` is called, or when `result` is called or the next step starts, which wait
        for the masks.
        """
        self.queue_samples()
        plan = plan_of(rows, self._tile_sizes)
        shape = self._buckets.of(plan.shape) if self._device.captures else plan.shape
        changes = self._slots.take_changes()
        parts = [part for change in changes for part in (change.places, change.values)]
        sent = self._buffers.send(self._turn, plan, shape, parts)
        if changes:
            self._device.queue(partial(self._slots.apply, changes, sent))
        adapted = self.model.adapters is not None and any(self._slots.has_adapter[row.slot] for row in rows)
        body = self._bodies.get((shape, adapted))
        if body is None:
            self._device.queue(partial(self._compute, shape, adapted))
        else:
            body()
        step = self._unsampled = _Step(self._turn, plan, masks, keep_logits)
        self._turn = (self._turn + 1) % _TURNS
        if not self._device.captures:  # the layers are computed already
            step.mask_wait_s, began_s = 0.0, time.perf_counter()
            if masks is not None:
                masks.wait()
                step.mask_wait_s = time.perf_counter() - began_s
            self._mask_wait_s += step.mask_wait_s
        if masks is None or not self._device.captures:
            self.queue_samples()
        return Pending(partial(self._read, step), partial(self._is_ready, step))

    def queue_samples(self) -> None:
        """Queue the sampling of the latest step, if it is not queued yet, and the copies of its results and times to the host.
        The copies stay valid for `_TURNS` steps."""
        if self._unsampled is None:
            return
        if torch.is_inference_mode_enabled():  # entering it again takes microseconds of every step
            self._queue_samples(self._unsampled)
        else:
            with torch.inference_mode():
                self._queue_samples(self._unsampled)

    def _queue_samples(self, step: "_Step") -> None:
        results, logprobs = self._head.start(step.turn, step.plan, step.masks, wants_logprobs=step.keep_logits)
        step.answer = self._answers[step.turn].first(NUM_SUMS + len(step.plan.sampled_slots))
        self._device.copy(step.answer, results)
        if logprobs is not None:
            step.logprobs = self._logprobs[step.turn, : len(logprobs)]
            self._device.copy(step.logprobs, logprobs)
        step.copied = self._device.record()
        self._unsampled = None

    def _is_ready(self, step: "_Step") -> bool:
        if step is self._unsampled and step.masks is not None and step.masks.is_done:
            self.queue_samples()
        return step.copied is not None and step.copied.is_reached()

    def _read(self, step: "_Step") -> Sampled:
        """The step's tokens. Called by the thread that starts steps, or by any thread once the sampling is queued."""
        if step is self._unsampled:
            self.queue_samples()
        assert step.copied is not None and step.answer is not None
        step.copied.wait()
        waited, sampled, *tokens = step.answer.tolist()
        # A step with prompt log-probabilities is read before the one that is still in flight.
        self._waited_s = max(self._waited_s, waited / 1e9)
        self.seconds_sampled = max(self.seconds_sampled, sampled / 1e9)
        result = Sampled.of(tokens, step.mask_wait_s)
        return result if step.logprobs is None else result._replace(logprobs=partial(unpacked, step.logprobs))

    def logits_of_samples(self, samples: Seq[int]) -> torch.Tensor:
        self.queue_samples()
        return self._device.compute(lambda: self._head.logits[list(samples)])

    def logits_of_tokens(self, tokens: range) -> torch.Tensor:
        self.queue_samples()
        return self._device.compute(lambda: self.model.logits(self._hidden_states[tokens.start : tokens.stop]).float())

    def hidden_states_of_tokens(self, tokens: range) -> torch.Tensor:
        return self._device.compute(lambda: self._hidden_states[tokens.start : tokens.stop].float())

    def _compute(self, shape: LaunchShape, adapted: bool) -> None:
        """Compute the layers of the step that was sent, into `_hidden_states`. For a graph, nothing waits for the host, and no
        shape or branch depends on a value. adapted: some token may have an adapter."""
        assert self._cache is not None, "allocate_cache comes first"
        self._hidden_states[: shape.tokens] = self.model.hidden_states(
            self._buffers.tensors(shape), self._slots, self._cache, self._head.clock, adapted=adapted
        )

    def _capture(self) -> None:
        """Capture a graph for each bucket.

        Captured steps compute nothing in attention and write to slot 0, while the cache is empty. If the capture fails on any
        rank, all ranks run without graphs, which is slower.
        """
        kinds = [False] if self.model.adapters is None else [True, False]
        shapes = [(shape, adapted) for shape in self._buckets.all for adapted in kinds]
        # Ranks communicate in these steps, so an error here fails the start of all ranks.
        bodies = [partial(self._compute, *shape) for shape in shapes]
        begin = time.perf_counter()
        self._device.warm_up([*bodies, *self._head.works])
        warm = time.perf_counter()
        failed = ""
        try:
            for shape in shapes:
                self._bodies[shape] = self._device.capture(partial(self._compute, *shape))
            self._head.capture()
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
        if not smallest(self.model.parallel, not failed):
            self.release_graphs()
            reason = failed or "another rank failed"
            log.warning("steps run without CUDA graphs, which is slower: %s", reason)
            return
        took = self.start_seconds
        took["warm_up"], took["capture"] = warm - begin, time.perf_counter() - warm
        log.info(
            "%d CUDA graphs were captured in %.2f s, after a warm-up of %.2f s and %.2f s for the cache",
            len(self._bodies) + self._head.num_graphs,
            took["capture"],
            took["warm_up"],
            took["cache"],
        )

    def becomes_idle(self, limit_s: float) -> bool:
        """Whether all queued work is done within this time."""
        done, deadline = self._device.record(), time.monotonic() + limit_s
        while not done.is_reached():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LEAVE_POLL_S)
        return True

    def release_graphs(self) -> None:
        self._device.synchronize()
        self._bodies.clear()
        self._head.release_graphs()


_have_graphs: weakref.WeakSet[FusedBackend] = weakref.WeakSet()


def _release_all_graphs() -> None:
    """NCCL destroys no group while graphs exist that its collectives are part of (pytorch#115388).

    A collective whose peer has ended never does; waiting for it would keep this process alive, and delay the error's report.
    """
    for backend in list(_have_graphs):
        if not backend.becomes_idle(_LEAVE_LIMIT_S):
            log.error("the device has not done its work within %g s: another rank has ended", _LEAVE_LIMIT_S)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        backend.release_graphs()
