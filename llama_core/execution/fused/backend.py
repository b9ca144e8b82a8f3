"""Steps on a GPU. A decode step is one CUDA graph, sampling included; the host reads its tokens while the next step runs."""

import logging
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from llama_core.checkpoint.rank_share import RankShare
from llama_core.config import EngineConfig
from llama_core.execution.attention import attend_prefills
from llama_core.execution.attention_metadata import build_metadata, sample_positions
from llama_core.execution.backend import NOT_FINITE, NOTHING_ALLOWED, Sampled, StepMasks
from llama_core.execution.fused.model import FusedTransformer
from llama_core.execution.fused.ops import SPLIT, Ops, TorchOps
from llama_core.execution.kv_cache import CacheShape, KVCache
from llama_core.execution.logit_rules import edit_logits
from llama_core.execution.parallel import Parallel, smallest
from llama_core.execution.sampling import sample_sorted
from llama_core.execution.slots import SlotTable
from llama_core.model_config import ModelConfig
from llama_core.scheduling.step import Pending, Row

log = logging.getLogger(__name__)

# What a decode step ends with: the most likely tokens, sampled tokens, or logits, which rules or grammars change afterwards.
Mode = Literal["greedy", "sampled", "logits"]
# Steps whose outputs may wait to be read. The driver keeps two in flight.
_TURNS = 4
# Temporary memory for each logit: softmax, sort (values, int64 ids, scratch) and two cumulative sums (one double).
_BYTES_PER_LOGIT = 56


def ops_for(device: torch.device) -> Ops:
    """The Triton kernels on a GPU where Triton works, else the operations in torch."""
    if device.type == "cuda":
        try:
            from llama_core.execution.fused.kernels import TritonOps

            ops = TritonOps()
            ops.gated_silu(torch.zeros((1, 2), device=device))  # builds Triton's launcher, which needs a C compiler
        except Exception as error:  # any error of Triton, the compiler or the file system
            log.warning(
                "Triton does not work here: attention gathers the cache and layers take more launches: %s", error
            )
        else:
            return ops
    return TorchOps()


def bucket_sizes(largest: int) -> list[int]:
    """Tokens of the decode steps that are captured: powers of two up to 32, then steps of 32, and `largest` itself."""
    sizes = {1 << i for i in range(6)} | set(range(32, largest, 32)) | {largest}
    return sorted(size for size in sizes if size <= largest)


def step_bytes(config: EngineConfig, model: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> int:
    """Of the largest step: activations, the gathered keys and values of a prompt, and sampling."""
    share = RankShare.of(model, parallel.rank, parallel.world_size)
    rows, splits = config.max_step_samples, -(-config.max_seq_len // SPLIT)
    n_heads, n_kv_heads = len(share.heads), len(share.kv_heads)
    heads = n_heads + 2 * n_kv_heads
    activations = config.max_step_tokens * (4 * model.dim + 2 * heads * model.head_dim + 3 * len(share.hidden))
    gathered = 2 * config.max_seq_len * n_kv_heads * model.head_dim
    mask = config.max_step_tokens * config.max_seq_len
    # Results of attention before the splits are combined.
    partial = rows * n_heads * splits * (model.head_dim + 1) * 4
    # Sampling, in the memory of the graphs and outside of it, and the logits of the latest step.
    logits = rows * config.vocab_size * (2 * _BYTES_PER_LOGIT + 4)
    return (activations + gathered + mask) * dtype.itemsize + 2 * partial + logits


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    result: torch.Tensor  # written by each replay: tokens int64 [bucket], or logits float32 [bucket, vocab]


class FusedBackend:
    def __init__(
        self, config: EngineConfig, model: FusedTransformer, parallel: Parallel, slots: SlotTable, ops: Ops
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
        self._hidden_states = torch.empty(0)
        max_samples = config.max_step_samples
        self._buckets = bucket_sizes(max_samples)
        self._spare_slot = config.max_batch_size
        self._graphs: dict[tuple[int, Mode], _Graph] = {}
        # The input of a graph: the slots of a decode step's tokens, then their positions, as many of each as the bucket has.
        self._inputs = torch.zeros(2 * max_samples, dtype=torch.int64, device=self._device)
        self._logits = torch.empty((max_samples, config.vocab_size), dtype=torch.float32, device=self._device)
        # Page-locked: copies between other memory and the device would block the host.
        self._turn = 0
        self._sent = torch.zeros((_TURNS, 2 * max_samples), dtype=torch.int64, pin_memory=self._on_gpu)
        self._answers = torch.zeros((_TURNS, max_samples), dtype=torch.int64, pin_memory=self._on_gpu)

    @property
    def name(self) -> str:
        return "fused" + (f", {len(self._graphs)} CUDA graphs" if self._graphs else "")

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    @property
    def cache_block_bytes(self) -> int:
        return self._cache_shape.block_bytes

    @property
    def working_bytes(self) -> int:
        return self._logits.nbytes + self.unallocated_bytes(self._config.max_seq_len)

    def unallocated_bytes(self, max_seq_len: int) -> int:
        config = replace(self._config, max_seq_len=max_seq_len)
        need = step_bytes(config, self.model.config, self._parallel, self.model.dtype)
        return need - self._logits.nbytes

    @property
    def seconds_waited(self) -> None:
        return None

    def allocate_cache(self, num_blocks: int) -> None:
        # Padding rows of a bucket write to one more block, which only the spare slot has.
        self._cache = KVCache(self._cache_shape, num_blocks + 1, self._device)
        self._slots.block_tables[self._spare_slot].fill_(num_blocks)
        if self._on_gpu:
            with torch.inference_mode():
                self._capture()

    def start(self, rows: Seq[Row], *, keep_logits: bool, masks: StepMasks | None = None) -> Pending[Sampled]:
        """Queue the step on the device. The next step uses its samples at once; the host reads them later."""
        if all(row.samples and row.length == 1 + row.num_drafts for row in rows):
            return self._start_decode(rows, masks)
        return self._start_mixed(rows, masks)

    def logits_of_samples(self, samples: Seq[int]) -> torch.Tensor:
        return self._logits[list(samples)]

    def logits_of_tokens(self, tokens: range) -> torch.Tensor:
        return self.model.logits(self._hidden_states[tokens.start : tokens.stop])

    def _start_decode(self, rows: Seq[Row], masks: StepMasks | None) -> Pending[Sampled]:
        """Rows that sample after each of their tokens. A row's drafts are further queries of its slot, at the following
        positions."""
        slots = [row.slot for row in rows for _ in range(row.length)]
        positions = [row.start + i for row in rows for i in range(row.length)]
        count = len(slots)
        bucket = next(size for size in self._buckets if size >= count)
        padding = bucket - count
        sent = self._sent[self._turn, : 2 * bucket]
        sent.copy_(torch.tensor(slots + [self._spare_slot] * padding + positions + [0] * padding))
        self._inputs[: 2 * bucket].copy_(sent, non_blocking=True)
        mode = self._mode(slots, masks)
        captured = self._graphs.get((bucket, mode))
        if captured is None:
            result = self._decode(bucket, mode)
        else:
            captured.graph.replay()
            result = captured.result
        if mode == "logits":
            samples = [(slot, position + 1) for slot, position in zip(slots, positions, strict=True)]
            result = self._sample_edited(samples, result[:count], masks)
        return self._read_later(result[:count])

    def _mode(self, slots: Seq[int], masks: StepMasks | None) -> Mode:
        """How a step samples for these slots."""
        if masks is not None or any(self._slots.rules[slot] is not None for slot in slots):
            return "logits"
        return "greedy" if all(self._slots.is_greedy[slot] for slot in slots) else "sampled"

    def _decode(self, bucket: int, mode: Mode) -> torch.Tensor:
        """The step whose slots and positions are in `_inputs`: tokens int64 [bucket], or logits float32 [bucket, vocab].

        No operation waits for the host or depends on a value.
        """
        assert self._cache is not None, "allocate_cache comes first"
        cache, ops, block_size = self._cache, self._ops, self._config.block_size
        index, positions = self._inputs[: 2 * bucket].view(2, bucket).unbind(0)
        block_tables = self._slots.block_tables[index]
        lengths = positions + 1
        block = block_tables.gather(1, (positions // block_size)[:, None]).squeeze(1)

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            window = self.model.config.window(layer)
            return ops.attend_decodes(q, cache.keys[layer], cache.values[layer], block_tables, lengths, window)

        tokens = self._slots.tokens[index, positions]
        hidden_states = self.model.hidden_states(
            tokens, positions, block * block_size + positions % block_size, cache, attend
        )
        logits = self._store_logits(hidden_states)
        return logits if mode == "logits" else self._sample(index, lengths, logits, mode == "greedy")

    def _start_mixed(self, rows: Seq[Row], masks: StepMasks | None) -> Pending[Sampled]:
        """A step with prefill rows. Each prefill row attends by itself, the decode rows together."""
        assert self._cache is not None, "allocate_cache comes first"
        cache, ops = self._cache, self._ops
        tokens, metadata, ends = build_metadata(rows, self._slots, self._config.block_size)

        def attend(layer: int, q: torch.Tensor) -> torch.Tensor:
            out, window = torch.empty(q.shape, dtype=q.dtype, device=q.device), self.model.config.window(layer)
            if len(metadata.decode_index):
                block_tables, lengths = metadata.decode_block_tables, metadata.decode_lengths
                out[metadata.decode_index] = ops.attend_decodes(
                    q[metadata.decode_index], cache.keys[layer], cache.values[layer], block_tables, lengths, window
                )
            attend_prefills(out, q, cache, layer, metadata, window)
            return out

        self._hidden_states = self.model.hidden_states(tokens, metadata.positions, metadata.slot_mapping, cache, attend)
        samples = sample_positions(rows, ends)
        if not samples:
            return self._read_later(torch.empty(0, dtype=torch.int64, device=self._device))
        last, slots, positions = torch.tensor(samples, device=self._device).unbind(1)
        logits = self._store_logits(self._hidden_states[last])
        mode = self._mode([slot for _, slot, _ in samples], masks)
        if mode == "logits":
            return self._read_later(self._sample_edited([sample[1:] for sample in samples], logits, masks))
        return self._read_later(self._sample(slots, positions, logits, mode == "greedy"))

    def _store_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """float32 [len(hidden_states), vocab], which stay until the next step."""
        logits = self._logits[: len(hidden_states)]
        return logits.copy_(self.model.logits(hidden_states))

    def _sample_edited(
        self, samples: Seq[tuple[int, int]], logits: torch.Tensor, masks: StepMasks | None
    ) -> torch.Tensor:
        """Like `_sample` for these slots and positions, after the rules and grammars of their slots have changed the logits.

        The host waits for `masks`, and the device for the host.
        """
        slots = self._slots
        index, positions = torch.tensor(samples, device=self._device).unbind(1)
        finite = logits.sum(-1).isfinite()
        edited = edit_logits(torch.where(finite[:, None], logits, 0.0), samples, slots.rules, slots.tokens, masks)
        allowed = edited.amax(-1) > -math.inf
        usable = torch.where(allowed[:, None], edited, 0.0)
        tokens = sample_sorted(usable, slots.sampling.at(index), positions)
        tokens = torch.where(allowed, tokens, NOTHING_ALLOWED).where(finite, NOT_FINITE)
        self._parallel.broadcast(tokens)
        slots.tokens[index, positions] = tokens.clamp(min=0)
        return tokens

    def _sample(
        self, index: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor, is_greedy: bool
    ) -> torch.Tensor:
        """Sample the tokens at `positions` of the slots `index` and store them as input: int64 [D], or NOT_FINITE."""
        slots = self._slots
        finite = logits.sum(-1).isfinite()
        usable = torch.where(finite[:, None], logits, 0.0)
        tokens = usable.argmax(-1) if is_greedy else sample_sorted(usable, slots.sampling.at(index), positions)
        # Ranks may differ in the last bit of a logit: rank 0 samples for all.
        self._parallel.broadcast(tokens)
        slots.tokens[index, positions] = tokens
        return torch.where(finite, tokens, NOT_FINITE)

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
        """A graph for each bucket and mode; largest first, so that the others fit into its memory.

        Captured steps run on slot 0, while the cache is empty. If the capture fails on any rank, all ranks run decode steps
        without graphs, which is slower.
        """
        modes: tuple[Mode, ...] = get_args(Mode)
        steps = [(bucket, mode) for bucket in reversed(self._buckets) for mode in modes]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # The first run, on a separate stream as torch requires, compiles kernels and opens NCCL's channels. Ranks communicate
        # in these steps, so an error here fails the start of all ranks.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for bucket, mode in steps:
                self._decode(bucket, mode)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        pool = torch.cuda.graph_pool_handle()
        failed = ""
        try:
            with torch.cuda.stream(torch.cuda.current_stream()):  # restores the stream after a failed capture
                for bucket, mode in steps:
                    graph = torch.cuda.CUDAGraph()
                    # thread_local: NCCL's watchdog queries its events from another thread, which must not end the capture.
                    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                        result = self._decode(bucket, mode)
                    self._graphs[bucket, mode] = _Graph(graph, result)
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
        if not smallest(self._parallel, not failed):
            self._graphs.clear()
            log.warning("decode steps run without CUDA graphs, which is slower: %s", failed or "another rank failed")
