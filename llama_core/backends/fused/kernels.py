"""The operations of `ops.py` in Triton. No launch waits for the host, and no row's result depends on the other rows."""

from typing import Final

import torch
import triton

from llama_core.backends.fused import adapter_kernels, layer_kernels
from llama_core.backends.fused.adapters import Adapted
from llama_core.backends.fused.attention_launches import attend, launches
from llama_core.backends.fused.layer_kernels import early_launch, norm_warps
from llama_core.backends.fused.ops import HeadChanges, RowNorm, SlotTokens, TorchOps
from llama_core.backends.fused.product_kernels import (
    Fuses,
    add_product,
    gated_product,
    has_many_outputs,
    never,
    product,
)
from llama_core.backends.fused.sampling import logit_kernels, sampling_kernels
from llama_core.backends.fused.sampling.logit_kernels import LogprobBuffers
from llama_core.backends.fused.sampling.sampler import Mode, SamplingState, TorchSampler
from llama_core.backends.fused.sampling.sampling_kernels import SamplingBuffers
from llama_core.backends.fused.step_plan import AttentionTiles, SampleTensors, StepTensors, TileSizes
from llama_core.backends.kv_cache import KVCache
from llama_core.backends.weight_formats.format import Bias, TorchMatrix
from llama_core.errors import ConfigError
from llama_core.model.operations import Activation, Attend

_COLUMNS: Final = 1024  # of an embedding that one program copies
_SAMPLES: Final = 128  # that one program stores
_HEADS_A_PROGRAM: Final = 8  # heads that one program rotates: 8 values of 16 bits for each thread, with heads of 128


class TritonOps(TorchOps):
    """See `TorchOps`. All tensors lie on the device; rows, and heads in a row, are contiguous."""

    def __init__(self, *, batch_invariant: bool = False, fuses: Fuses = never) -> None:
        """batch_invariant: a token's attention has the same bits in a decode, with drafts and in any chunk of a prompt. fuses:
        chooses the products that run in kernels of our own, together with the operation that follows; with `batch_invariant`,
        no product does."""
        self._batch_invariant = batch_invariant
        self._fuses = never if batch_invariant else fuses

    def embed(
        self, step: StepTensors, known: SlotTokens, block_size: int, embeddings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, columns = len(step.slots), embeddings.shape[1]
        out = torch.empty((count, columns), dtype=embeddings.dtype, device=embeddings.device)
        results = out, torch.empty(count, dtype=torch.int64, device=embeddings.device)
        block = min(_COLUMNS, triton.next_power_of_2(columns))
        places, strides = (step.slots, step.positions), (known.tokens.stride(0), known.block_tables.stride(0))
        layer_kernels._embed[(count, triton.cdiv(columns, block))](
            known, places, embeddings, results, *strides, columns, block_size=block_size, block=block
        )
        return results

    def store_samples(
        self, sampled: torch.Tensor, samples: SampleTensors, slot_tokens: torch.Tensor, results: torch.Tensor
    ) -> None:
        count, places = len(sampled), (samples.slots, samples.positions)
        layer_kernels._store_samples[(triton.cdiv(count, _SAMPLES),)](
            sampled, *places, slot_tokens, results, slot_tokens.stride(0), count, block=_SAMPLES
        )

    def add_norm(
        self, hidden_states: torch.Tensor, delta: torch.Tensor | None, norm: RowNorm, bias: Bias = None
    ) -> torch.Tensor:
        """As `TorchOps.add_norm`. delta: also float32 [splits, T, dim], whose splits are added in order."""
        num_splits = len(delta) if delta is not None and delta.ndim == 3 else 0
        out = torch.empty_like(hidden_states)
        count, dim = hidden_states.shape
        options = {"block": triton.next_power_of_2(dim), "num_warps": norm_warps(dim), **early_launch()}
        layer_kernels._add_norm[(count,)](
            norm.weight, hidden_states, delta, bias, out, dim, norm.eps, num_splits=num_splits, **options
        )
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        changes: HeadChanges,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        cache: KVCache,
    ) -> torch.Tensor:
        count, total_heads, head_dim = qkv.shape
        n_kv_heads = cache.keys.shape[2]
        n_heads = total_heads - 2 * n_kv_heads
        bias, norms, q_table, k_table = changes
        q_norm, k_norm, eps = norms or (None, None, 0.0)
        heads = min(_HEADS_A_PROGRAM, triton.next_power_of_2(total_heads))
        # One read of the angles where q and k have the same.
        keys_table = None if k_table is q_table else k_table
        read = qkv, q_table, positions, slot_mapping
        sizes = {"head_dim": head_dim, "dim_block": triton.next_power_of_2(head_dim), "heads": heads}
        sizes["turns_keys"] = k_table is not None
        layer_kernels._rotate_and_store[(count, triton.cdiv(total_heads, heads))](
            *read, *cache, q_norm, k_norm, bias, keys_table, eps, n_heads, n_kv_heads, **sizes, **early_launch()
        )
        return qkv[:, :n_heads]

    def tile_sizes(self, n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype) -> TileSizes:
        """The rows of a launch, divided by the query heads that share a key head."""
        group = n_heads // n_kv_heads
        decode, chunk = launches(group, dtype, head_dim, batch_invariant=self._batch_invariant)
        return TileSizes(decode.rows // group, chunk.rows // group)

    def attend(
        self,
        q: torch.Tensor,
        cache: KVCache,
        block_tables: torch.Tensor,
        tiles: AttentionTiles,
        how: Attend,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if sinks is not None:  # no model without experts has some, and no CUDA graph has experts
            return super().attend(q, cache, block_tables, tiles, how, sinks)
        return attend(q, cache, block_tables, tiles, how, batch_invariant=self._batch_invariant)

    def gate(self, gate_up: torch.Tensor, bias: Bias = None, activation: Activation = "silu") -> torch.Tensor:
        if activation == "clamped_swiglu":  # of experts alone
            return super().gate(gate_up, bias, activation)
        count, width = gate_up.shape
        hidden = width // 2
        out = torch.empty((count, hidden), dtype=gate_up.dtype, device=gate_up.device)
        block = min(1024, triton.next_power_of_2(hidden))
        layer_kernels._gate[(count, triton.cdiv(hidden, block))](
            gate_up, bias, out, hidden, activation=activation, block=block
        )
        return out

    def product(self, x: torch.Tensor, matrix: TorchMatrix) -> torch.Tensor:
        if self._fuses(matrix.held, len(x)) and has_many_outputs(matrix.held):
            return product(x, matrix.held)
        return super().product(x, matrix)

    def gated_product(
        self, x: torch.Tensor, matrix: TorchMatrix, bias: Bias = None, activation: Activation = "silu"
    ) -> torch.Tensor:
        if self._fuses(matrix.held, len(x)) and activation != "clamped_swiglu":
            return gated_product(x, matrix.held, bias, activation)
        return super().gated_product(x, matrix, bias, activation)

    def add_product_norm(
        self, hidden_states: torch.Tensor, x: torch.Tensor, matrix: TorchMatrix, norm: RowNorm, bias: Bias = None
    ) -> torch.Tensor:
        if not self._fuses(matrix.held, len(x)):
            return super().add_product_norm(hidden_states, x, matrix, norm, bias)
        partial = add_product(hidden_states, x, matrix.held, bias)
        return self.add_norm(hidden_states, partial, norm, None if partial is None else bias)

    def add_adapters(self, y: torch.Tensor, x: torch.Tensor, adapted: Adapted | None) -> torch.Tensor:
        if adapted is not None:
            adapter_kernels.add_adapters(y, x, adapted)
        return y

    def sampler(self, state: SamplingState, max_samples: int, vocab: int) -> TorchSampler:
        return TritonSampler(state, max_samples, vocab)

    def add_time(self, sums: torch.Tensor, index: int, factor: int) -> None:
        """As `TorchOps.add_time`, by the GPU's clock, whose resolution is 32 ns to 1 us. Triton's interpreter has no clock."""
        has_clock = not triton.knobs.runtime.interpret
        layer_kernels._add_time[(1,)](sums, factor, index=index, has_clock=has_clock, num_warps=1)


class TritonSampler(TorchSampler):
    """See `TorchSampler`: for up to `max_samples` rows of `vocab` logits."""

    def __init__(self, state: SamplingState, max_samples: int, vocab: int) -> None:
        """Raises ConfigError if the sums of so large a vocabulary would overflow."""
        if vocab > sampling_kernels.MAX_VOCAB:
            raise ConfigError(
                f"a vocabulary of {vocab} tokens is larger than {sampling_kernels.MAX_VOCAB}: give backend: torch",
                param="backend",
            )
        device = state.tokens.device
        super().__init__(state)
        self._buffers = SamplingBuffers(max_samples, vocab, device)
        self._logprobs = LogprobBuffers(max_samples, vocab, device)

    @property
    def nbytes(self) -> int:
        return self._buffers.nbytes + self._logprobs.nbytes

    def sample(self, logits: torch.Tensor, samples: SampleTensors, mode: Mode) -> torch.Tensor:
        if mode in ("ruled", "masked"):
            logit_kernels.edit(logits, self._state, samples, self._buffers, has_masks=mode == "masked")
        return sampling_kernels.sample(logits, self._state.sampling, samples, self._buffers, mode)

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return logit_kernels.logprobs(logits, tokens, self._logprobs)
