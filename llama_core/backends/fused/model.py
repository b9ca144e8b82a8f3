"""One rank's part of the Transformer. Projections of one input are one matrix, and no call waits, so that a CUDA graph can
capture a whole step.

Formulas: RMSNorm (Zhang and Sennrich 2019), rotary embedding (`rotary.py`), grouped-query attention (Ainslie et al. 2023),
SwiGLU (Shazeer 2020), sliding windows (Beltagy et al. 2020).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from llama_core.backends.fused.adapters import Adapted, AdapterTables
from llama_core.backends.fused.ops import HeadNorms, StepClock, TorchOps
from llama_core.backends.fused.step_plan import StepTensors
from llama_core.backends.kv_cache import KVCache
from llama_core.backends.parallel import Parallel
from llama_core.backends.rotary import rotary_table
from llama_core.backends.weight_formats.format import TorchMatrix, TorchMatrixType
from llama_core.model_config import ModelConfig
from llama_core.model_weights import first_rows, weight_specs
from llama_core.rank_share import RankShare
from llama_core.weights.loader import GroupedWeight

_MATRICES = ("qkv", "out", "gate_up", "down")
# (layer, queries [T, H, head_dim]) -> [T, H, head_dim]
Attend = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """qkv [(H + 2 K) head_dim, dim], out [dim, H head_dim], gate_up [2 hidden, dim], down [dim, hidden] of this rank, and the
    other tensors of a layer in `model_weights.py`."""

    attention_norm: torch.Tensor
    qkv: TorchMatrix
    out: TorchMatrix
    ffn_norm: torch.Tensor
    gate_up: TorchMatrix
    down: TorchMatrix
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def head_norms(self, eps: float) -> HeadNorms | None:
        return None if self.q_norm is None or self.k_norm is None else HeadNorms(self.q_norm, self.k_norm, eps)


class FusedTransformer:
    """This rank's weights and their computation: `hidden_states` for the layers, then `logits` for some of the tokens."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallel,
        max_seq_len: int,
        dtype: torch.dtype,
        ops: TorchOps,
        matrix_type: Callable[[str], TorchMatrixType],
        weights: Iterable[tuple[str, torch.Tensor | GroupedWeight]],
        *,
        batch_invariant: bool = False,
    ) -> None:
        """`matrix_type`: the type of a matrix by its name: "layers.N." and a field of `Layer`, or "output". `weights`: those of
        `load`, which may also be called later. `batch_invariant`: the bits of a token's hidden states do not depend on the
        number of tokens; `ops` must keep that too.
        """
        self.config = config
        self.dtype = dtype
        self.parallel = parallel
        self._ops = ops
        self._sum = parallel.sum_in_rank_order if batch_invariant else parallel.sum
        self._shares = [RankShare.of(config, rank, parallel.world_size) for rank in range(parallel.world_size)]
        self.share = self._shares[parallel.rank]
        self.head_dim = config.head_dim
        self.n_heads, self.n_kv_heads = len(self.share.heads), len(self.share.kv_heads)
        self._specs = weight_specs(config)
        self._first_rows, shapes = first_rows(self._specs, self.share)
        linear = {spec.tensor for spec in self._specs.values() if spec.is_linear}
        self._tensors: dict[str, Any] = {
            name: matrix_type(name)(*shape, dtype, parallel.device, batch_invariant=batch_invariant)
            if name in linear
            else torch.empty(shape, dtype=dtype, device=parallel.device)
            for name, shape in shapes.items()
        }
        self._embeddings, self._norm, self._output = (
            self._tensors[each] for each in ("tok_embeddings", "norm", "output")
        )
        layers: list[dict[str, Any]] = [{} for _ in range(config.n_layers)]
        for name, tensor in self._tensors.items():
            if name.startswith("layers."):
                _, i, held = name.split(".")
                layers[int(i)][held] = tensor
        self._layers = [Layer(**held) for held in layers]
        self.adapters: AdapterTables | None = None
        self._rotary = rotary_table(config.rope, self.head_dim, max_seq_len, parallel.device)
        self.load(weights)

    def load(self, weights: Iterable[tuple[str, torch.Tensor | GroupedWeight]]) -> None:
        """Copy this rank's part of each weight into its tensor. Weights have Meta's names, and are in `dtype` or in groups. The
        tensors exist from the start, so a graph may be captured before this call."""
        for name, weight in weights:
            tensor, first = self._tensors[self._specs[name].tensor], self._first_rows[name]
            if isinstance(tensor, TorchMatrix):
                tensor.set_rows(first, weight)
            else:
                tensor[first : first + len(weight)].copy_(weight)

    @property
    def weight_bytes(self) -> int:
        return sum(getattr(tensor, "held", tensor).nbytes for tensor in self._tensors.values())

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept beside the weights: the rotary table, and adapters."""
        return self._rotary.nbytes + (0 if self.adapters is None else self.adapters.nbytes)

    def hidden_states(
        self,
        step: StepTensors,
        slot_tokens: torch.Tensor,
        block_tables: torch.Tensor,
        cache: KVCache,
        attend: Attend,
        clock: StepClock,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The last layer's normed hidden states [T, dim]. slot_tokens, block_tables: as in `TorchOps.embed`. places: int64 [T],
        of the tokens' LoRA adapters, 0 for none; None where no token has one.

        Each layer calls `attend` after it has written its keys and values to the cache. `clock` gets the time in two
        collectives: that of the embeddings, where a rank waits for ranks that began the step later, and those of one layer,
        which stand for all layers because each reading of the clock is a kernel.
        """
        ops, eps = self._ops, self.config.norm_eps
        h, slot_mapping = self._embed(step, slot_tokens, block_tables, cache.keys[0].shape[1], clock)
        x = ops.add_norm(h, None, self._layers[0].attention_norm, eps)
        next_norms = [*(layer.attention_norm for layer in self._layers[1:]), self._norm]
        for i, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            timed = clock if i == len(self._layers) // 2 else None
            qkv_lora, out_lora, gate_up_lora, down_lora = self._adapted(i, places)
            qkv = ops.add_adapters(ops.product(x, layer.qkv), x, qkv_lora).view(len(x), -1, self.head_dim)
            arguments = step.positions, slot_mapping, cache.keys[i], cache.values[i]
            q = ops.rotate_and_store(qkv, self._rotary, *arguments, layer.qkv_bias, layer.head_norms(eps))
            x = self._add_product(
                h, attend(i, q).flatten(1), layer.out, layer.ffn_norm, layer.out_bias, timed, out_lora
            )
            gated = self._gated_product(x, layer, gate_up_lora)
            x = self._add_product(h, gated, layer.down, next_norm, layer.down_bias, timed, down_lora)
        return x

    def _embed(
        self,
        step: StepTensors,
        slot_tokens: torch.Tensor,
        block_tables: torch.Tensor,
        block_size: int,
        clock: StepClock,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The embeddings [T, dim] and the slot mapping, int64 [T], of the step's tokens."""
        columns = [len(share.columns) for share in self._shares]
        part, slot_mapping = self._ops.embed(
            slot_tokens, block_tables, step.slots, step.positions, block_size, self._embeddings
        )
        with clock.waiting() if self.parallel.world_size > 1 else nullcontext():
            return self.parallel.gather_columns(part, columns), slot_mapping

    def _gated_product(self, x: torch.Tensor, layer: Layer, lora: Adapted | None) -> torch.Tensor:
        if lora is None:
            return self._ops.gated_product(x, layer.gate_up, layer.gate_up_bias)
        gate_up = self._ops.add_adapters(self._ops.product(x, layer.gate_up), x, lora)
        return self._ops.gated_silu(gate_up, layer.gate_up_bias)

    def _add_product(
        self,
        hidden_states: torch.Tensor,
        x: torch.Tensor,
        matrix: TorchMatrix,
        norm: torch.Tensor,
        bias: torch.Tensor | None,
        clock: StepClock | None,
        lora: Adapted | None,
    ) -> torch.Tensor:
        """hidden_states += the product, summed over the ranks, + bias; then their norm. clock: gets the time of the sum, times
        the number of layers."""
        eps = self.config.norm_eps
        if self.parallel.world_size == 1 and lora is None:
            return self._ops.add_product_norm(hidden_states, x, matrix, norm, eps, bias)
        if self.parallel.world_size == 1:
            delta = self._ops.add_adapters(matrix.multiply(x), x, lora)
        else:
            waiting = clock.waiting(len(self._layers)) if clock is not None else nullcontext()
            delta = self._sum_of_products(x, matrix, waiting, lora)
        return self._ops.add_norm(hidden_states, delta, norm, eps, bias)

    def _sum_of_products(
        self, x: torch.Tensor, matrix: TorchMatrix, waiting: AbstractContextManager[None], lora: Adapted | None
    ) -> torch.Tensor:
        """The sum over the ranks, made within `waiting`."""
        partial = self._ops.add_adapters(matrix.multiply(x), x, lora)
        with waiting:
            return self._sum(partial)

    def _adapted(self, layer: int, places: torch.Tensor | None) -> list[Adapted | None]:
        """Of the layer's matrices in the order of their products."""
        if places is None or self.adapters is None:
            return [None] * len(_MATRICES)
        tables = self.adapters.by_matrix
        return [Adapted(tables[f"layers.{layer}.{name}"], places) for name in _MATRICES]

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [R, dim] -> [R, vocab_size] in the model's dtype, whole on every rank."""
        part = self._output.multiply(hidden_states)
        return self.parallel.gather_columns(part, [len(share.vocab) for share in self._shares])
