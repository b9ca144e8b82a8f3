"""A step in plain torch, on any device: the reference for the other backends."""

import math
import time
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from llama_core.checkpoint.rank_share import RankShare
from llama_core.config import EngineConfig
from llama_core.execution.attention_metadata import build_metadata, sample_positions
from llama_core.execution.backend import NOT_FINITE, NOTHING_ALLOWED, Sampled, StepMasks
from llama_core.execution.kv_cache import CacheShape, KVCache
from llama_core.execution.logit_rules import edit_logits
from llama_core.execution.parallel import Parallel
from llama_core.execution.reference.model import Transformer
from llama_core.execution.reference.stopwatch import stopwatch_of
from llama_core.execution.sampling import sample
from llama_core.execution.slots import SlotTable
from llama_core.model_config import ModelConfig
from llama_core.scheduling.step import Pending, Row


def step_bytes(config: EngineConfig, model: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> int:
    """Temporary memory of the largest step: activations in float32, gathered keys (twice, once transposed) and values, scores
    and weights in float32, the mask of a prompt, and logits three times (as computed, in float32, sorted)."""
    share, itemsize = RankShare.of(model, parallel.rank, parallel.world_size), dtype.itemsize
    heads = len(share.heads) + 2 * len(share.kv_heads)
    activations = 4 * config.max_step_tokens * (4 * model.dim + 2 * heads * model.head_dim + 3 * len(share.hidden))
    keys = config.max_batch_size * config.max_seq_len
    gathered = 3 * keys * len(share.kv_heads) * model.head_dim * itemsize
    scores = 2 * keys * len(share.heads) * 4
    mask = min(config.max_step_tokens, config.max_seq_len) * config.max_seq_len * itemsize
    logits = config.max_step_samples * config.vocab_size * (itemsize + 8)
    return activations + gathered + scores + mask + logits


def choose_attention(device: torch.device) -> None:
    """On a GPU, without cuDNN's attention, which torch prefers on some: it makes a plan for each new shape, in up to half a
    second, and each chunk of a prompt has its own."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


class TorchBackend:
    def __init__(self, config: EngineConfig, model: Transformer, parallel: Parallel, slots: SlotTable) -> None:
        choose_attention(parallel.device)
        self.model = model
        self._config = config
        self._parallel = parallel
        self._slots = slots
        dtype: torch.dtype = next(model.parameters()).dtype
        self._cache_shape = CacheShape.of(model.config, config.block_size, parallel, dtype)
        self._cache: KVCache | None = None
        self._hidden_states = self._logits = torch.empty(0)
        self._sampling = stopwatch_of(parallel.device)
        self._mask_wait_s = 0.0

    @property
    def name(self) -> str:
        return "torch"

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.model.parameters())

    @property
    def cache_block_bytes(self) -> int:
        return self._cache_shape.block_bytes

    @property
    def working_bytes(self) -> int:
        return self.unallocated_bytes(self._config.max_seq_len)

    def unallocated_bytes(self, max_seq_len: int) -> int:
        config = replace(self._config, max_seq_len=max_seq_len)
        return step_bytes(config, self.model.config, self._parallel, self._cache_shape.dtype)

    @property
    def seconds_waited(self) -> float:
        """In collectives, the exchange of values included, and for masks."""
        return self.model.collectives.seconds + self._mask_wait_s

    @property
    def seconds_sampled(self) -> float:
        return self._sampling.seconds

    def allocate_cache(self, num_blocks: int) -> None:
        self._cache = KVCache(self._cache_shape, num_blocks, self._parallel.device)

    def start(self, rows: Seq[Row], *, keep_logits: bool, masks: StepMasks | None = None) -> Pending[Sampled]:
        assert self._cache is not None, "allocate_cache comes first"
        tokens, metadata, ends = build_metadata(rows, self._slots, self._config.block_size)
        self._hidden_states = self.model(tokens, self._cache, metadata)
        samples = sample_positions(rows, ends)
        if not samples:
            return Pending.done(Sampled.of([]))
        last = torch.tensor([token for token, _, _ in samples], device=self._parallel.device)
        self._logits = self.model.logits(self._hidden_states[last])
        return Pending.done(self._sample([sample[1:] for sample in samples], self._logits, masks))

    def queue_samples(self) -> None:
        """`start` has computed them."""

    def logits_of_samples(self, samples: Seq[int]) -> torch.Tensor:
        return self._logits[list(samples)]

    def logits_of_tokens(self, tokens: range) -> torch.Tensor:
        return self.model.logits(self._hidden_states[tokens.start : tokens.stop])

    def _sample(self, samples: Seq[tuple[int, int]], logits: torch.Tensor, masks: StepMasks | None) -> Sampled:
        """Sample the tokens of these slots and positions from logits [D, vocab], and store them as input."""
        slots = self._slots
        index, positions = torch.tensor(samples, device=self._parallel.device).unbind(1)
        mask_wait_s = 0.0
        if self._parallel.rank == 0:
            if masks is not None:
                began_s = time.perf_counter()
                masks.wait()
                mask_wait_s = time.perf_counter() - began_s
                self._mask_wait_s += mask_wait_s
            with self._sampling.timing():
                finite = logits.sum(-1).isfinite()
                edited = edit_logits(logits, samples, slots.rules, slots.tokens, masks)
                allowed = edited.amax(-1) > -math.inf
                # A row that has no token samples from zeros.
                usable = torch.where((finite & allowed)[:, None], edited, torch.zeros_like(edited))
                tokens = sample(usable, slots.sampling.at(index), positions)
                tokens = torch.where(allowed, tokens, NOTHING_ALLOWED).where(finite, NOT_FINITE)
        else:
            tokens = torch.empty_like(index)
        # Rank 0 samples for all ranks: on other CPUs or libraries, ranks may differ in the last bit of a logit.
        with self.model.collectives.timing():
            self._parallel.broadcast(tokens)
        slots.tokens[index, positions] = tokens.clamp(min=0)
        sampled = Sampled.of(tokens.tolist(), mask_wait_s)
        self.model.collectives.read()
        self._sampling.read()
        return sampled
