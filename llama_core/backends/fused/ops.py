"""The operations of a step beside its matrix products, in torch for any device; `kernels.py` has them for CUDA."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F

from llama_core.backends.attention import attend_decodes, attend_prefill, first_seen
from llama_core.backends.fused.adapters import Adapted
from llama_core.backends.fused.sampling.sampler import SamplingState, TorchSampler
from llama_core.backends.fused.step_plan import AttentionTiles, SampleTensors, StepTensors, TileSizes
from llama_core.backends.kv_cache import FLOAT8_BYTES, KVCache, cached_as
from llama_core.backends.rotary import rotate
from llama_core.backends.weight_formats.format import Bias, TorchMatrix
from llama_core.model.operations import Activation, Attend

NUM_SUMS: Final = 2
_WAITED, _SAMPLED = range(NUM_SUMS)

# An operation of torch, so that a recorded graph reads the clock at each replay.
_library: Any = torch.library.Library("llama_core", "DEF")  # type: ignore[no-untyped-call]
_library.define("add_time(Tensor(a!) sums, int index, int factor) -> ()")


def _add_time(sums: torch.Tensor, index: int, factor: int) -> None:
    if sums.is_cuda:
        torch.cuda.synchronize()
    sums[index] += factor * time.perf_counter_ns()


for _key in ("CPU", "CUDA"):
    _library.impl("add_time", _add_time, _key)
_library.impl("add_time", lambda sums, index, factor: None, "Meta")


class SlotTokens(NamedTuple):
    """Of all slots: tokens int64 [slots, max_seq_len], and block_tables int64 [slots, N] of block numbers."""

    tokens: torch.Tensor
    block_tables: torch.Tensor


class RowNorm(NamedTuple):
    """RMSNorm of whole rows: its factors, [dim]."""

    weight: torch.Tensor
    eps: float


class HeadNorms(NamedTuple):
    """RMSNorm of each head of q and of k: the factors of both, [head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


class HeadChanges(NamedTuple):
    """What happens to the heads of q, k and v before they are used, in this order. bias: [(H + 2 K) head_dim]. norms: of q and
    k. q_table, k_table: `rotary_table`, whose angles turn q and k; None for no rotation."""

    bias: Bias = None
    norms: HeadNorms | None = None
    q_table: torch.Tensor | None = None
    k_table: torch.Tensor | None = None


class TorchOps:
    """The operations in torch, which define the results of the Triton kernels (`kernels.TritonOps`). T tokens of a step. H and
    K: query and key/value heads of this rank.

    The biases of matrix products are added here, because the kernels read the products anyway.
    """

    def embed(
        self, step: StepTensors, known: SlotTokens, block_size: int, embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The embeddings [T, columns] of the step's tokens, from `embeddings` [vocab, columns], and the slot mapping of these
        tokens, int64 [T]: their physical positions in the cache."""
        blocks = known.block_tables[step.slots, step.positions // block_size]
        places = blocks * block_size + step.positions % block_size
        return F.embedding(known.tokens[step.slots, step.positions], embeddings), places

    def add_norm(
        self, hidden_states: torch.Tensor, delta: torch.Tensor | None, norm: RowNorm, bias: Bias = None
    ) -> torch.Tensor:
        """hidden_states [T, dim] += delta + bias [dim], in place; then RMSNorm of it, a new tensor. No bias without a delta."""
        if delta is not None:
            hidden_states += delta if bias is None else delta + bias
        return _norm(hidden_states, *norm)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        changes: HeadChanges,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache: KVCache,
    ) -> torch.Tensor:
        """Queries [T, H, head_dim] of qkv [T, H + 2 K, head_dim], which may be overwritten, after its changes.

        Keys and values are stored at the physical positions `slot_mapping` int64 [T] of one layer's cache, of the dtype of qkv
        or FLOAT8_BYTES. positions: int64 [T], by which q and k are rotated.
        """
        bias, norms, q_table, k_table = changes
        n_kv_heads = cache.keys.shape[2]
        n_heads = qkv.shape[1] - 2 * n_kv_heads
        if bias is not None:
            qkv = qkv + bias.view(qkv.shape[1:])
        q, k, v = torch.split(qkv, [n_heads, n_kv_heads, n_kv_heads], dim=1)
        if norms is not None:
            q, k = _norm(q, norms.q, norms.eps), _norm(k, norms.k, norms.eps)
        q = q if q_table is None else rotate(q, q_table[positions])
        k = k if k_table is None else rotate(k, k_table[positions])
        for cached, new in zip(cache, (k, v), strict=True):
            cached.flatten(0, 1).index_copy_(0, slot_mapping, cached_as(cached.dtype, new))
        return q

    def tile_sizes(self, n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype) -> TileSizes:
        """The sizes of the tiles that `attend` expects."""
        return TileSizes(1 << 30, 1 << 30)

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        block_tables: torch.Tensor,
        tiles: AttentionTiles,
        how: Attend,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, H, head_dim] -> the same: the token at position p of a slot attends to the slot's positions 0 .. p, of these to
        those in `how.window`. Blocks outside the window are not read. Tokens that are in no tile have undefined results.

        cache: one layer's. block_tables: int64 [slots, N] block numbers. sinks: [H], or None.
        """
        (keys, values), window, scale = cache, how.window, how.scale
        if keys.dtype == FLOAT8_BYTES:
            keys, values = (each.view(torch.float8_e4m3fn).to(q.dtype) for each in cache)
        out, block_size = torch.zeros(q.shape, dtype=q.dtype, device=q.device), keys.shape[1]
        single = tiles.decodes[tiles.decodes[:, 1] == 1]
        if len(single):
            tokens, _, slots, positions, _ = single.unbind(1)
            num_blocks = int(positions.max()) // block_size + 1
            seen = block_tables[slots, :num_blocks]
            out[tokens] = attend_decodes(q[tokens], keys, values, seen, positions + 1, window, scale, sinks)
        several = [tiles.decodes[tiles.decodes[:, 1] > 1], tiles.chunks[tiles.chunks[:, 1] > 0]]
        for begin, count, slot, start, _ in torch.cat(several).tolist():
            first = max(0, first_seen(start, window)) if window else 0
            position = torch.arange(first, start + count, device=q.device)
            place = block_tables[slot, position // block_size] * block_size + position % block_size
            seen_keys, seen_values = keys.flatten(0, 1)[place], values.flatten(0, 1)[place]
            asked = q[begin : begin + count]
            out[begin : begin + count] = attend_prefill(asked, seen_keys, seen_values, window, scale, sinks)
        return out

    def gate(self, gate_up: torch.Tensor, bias: Bias = None, activation: Activation = "silu") -> torch.Tensor:
        """activation(gate) * up for gate_up [T, 2 * hidden] + bias [2 * hidden], gate first: [T, hidden]."""
        gate, up = (gate_up if bias is None else gate_up + bias).chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            gate = gate.clamp(max=7.0)
            return (up.clamp(-7.0, 7.0) + 1) * (gate * torch.sigmoid(gate * 1.702))
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up

    def product(self, x: torch.Tensor, matrix: TorchMatrix) -> torch.Tensor:
        """x [T, inputs] times a matrix [outputs, inputs]: [T, outputs]."""
        return matrix.multiply(x)

    def gated_product(
        self, x: torch.Tensor, matrix: TorchMatrix, bias: Bias = None, activation: Activation = "silu"
    ) -> torch.Tensor:
        """`gate` of x [T, inputs] times a matrix [2 * hidden, inputs]: [T, hidden]."""
        return self.gate(matrix.multiply(x), bias, activation)

    def add_product_norm(
        self, hidden_states: torch.Tensor, x: torch.Tensor, matrix: TorchMatrix, norm: RowNorm, bias: Bias = None
    ) -> torch.Tensor:
        """`add_norm` of x [T, inputs] times a matrix [dim, inputs] as its delta."""
        return self.add_norm(hidden_states, matrix.multiply(x), norm, bias)

    def add_adapters(self, y: torch.Tensor, x: torch.Tensor, adapted: Adapted | None) -> torch.Tensor:
        """y [T, outputs], the product of x [T, inputs] and a matrix, with what the tokens' LoRA adapters add, in place."""
        if adapted is not None:
            adapted.adapters.add_to(y, x, adapted.places)
        return y

    def store_samples(
        self, sampled: torch.Tensor, samples: SampleTensors, slot_tokens: torch.Tensor, results: torch.Tensor
    ) -> None:
        """Write `sampled` to `results`, int64 [S] each, and to slot_tokens int64 [all slots, max_seq_len] at the slots and
        positions of the samples. A negative sample (NOT_FINITE, NOTHING_ALLOWED) is 0 in `slot_tokens`. Samples of padding may
        have the same slot and position.
        """
        slot_tokens[samples.slots, samples.positions] = sampled.clamp(min=0)
        results.copy_(sampled)

    def sampler(self, state: SamplingState, max_samples: int, vocab: int) -> TorchSampler:
        """A sampler for at most `max_samples` rows of `vocab` logits."""
        return TorchSampler(state)

    def add_time(self, sums: torch.Tensor, index: int, factor: int) -> None:
        """sums[index] += factor * the clock in nanoseconds, when the device reaches this work. sums: int64, which may wrap
        around: only differences of two readings count."""
        torch.ops.llama_core.add_time(sums, index, factor)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).type_as(x)
    return (normed * weight).type_as(x)  # factors with an offset are float32


class StepClock:
    """Sums, on the device, how long steps wait for other ranks and how long they sample. sums: int64 [NUM_SUMS], in
    nanoseconds, valid after a whole step only.

    An event would have a race: the next replay of a graph records its events anew, and is queued before the host reads them.
    """

    def __init__(self, ops: TorchOps, sums: torch.Tensor) -> None:
        self._ops = ops
        self._sums = sums

    def waiting(self, times: int = 1) -> AbstractContextManager[None]:
        """Add the time of the operations inside the block, times `times`, to the time of waiting."""
        return self._added_to(_WAITED, times)

    def sampling(self) -> AbstractContextManager[None]:
        return self._added_to(_SAMPLED, 1)

    @contextmanager
    def _added_to(self, index: int, times: int) -> Iterator[None]:
        self._ops.add_time(self._sums, index, -times)
        yield
        self._ops.add_time(self._sums, index, times)
