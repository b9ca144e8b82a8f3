"""One rank's part of the Transformer. Projections of one input are one matrix, and no call waits, so that a CUDA graph can
capture a whole step.

Formulas: RMSNorm (Zhang and Sennrich 2019), rotary embedding (`rotary.py`), grouped-query attention (Ainslie et al. 2023),
SwiGLU (Shazeer 2020), sliding windows (Beltagy et al. 2020).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from llama_core.backends.fused.ops import HeadNorms, StepClock, TorchOps
from llama_core.backends.fused.step_plan import StepTensors
from llama_core.backends.kv_cache import KVCache
from llama_core.backends.parallel import Parallel
from llama_core.backends.rotary import rotary_table
from llama_core.backends.weight_formats.format import TorchMatrix, TorchMatrixType
from llama_core.files.rank_share import RankShare
from llama_core.model_config import ModelConfig
from llama_core.weights.loader import GroupedWeight

# (layer, queries [T, H, head_dim]) -> [T, H, head_dim]
Attend = Callable[[int, torch.Tensor], torch.Tensor]
# Writes a part of the checkpoint to its place.
Place = Callable[[Any], object]


@dataclass(slots=True)
class Layer:
    """qkv [(H + 2 K) head_dim, dim], out [dim, H head_dim], gate_up [2 hidden, dim], down [dim, hidden] of this rank.

    biases: of the matrices that have one, by the names of their fields.
    """

    attention_norm: torch.Tensor
    qkv: TorchMatrix
    out: TorchMatrix
    ffn_norm: torch.Tensor
    gate_up: TorchMatrix
    down: TorchMatrix
    head_norms: HeadNorms | None = None
    biases: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        matrices = [self.qkv, self.out, self.gate_up, self.down]
        tensors = [self.attention_norm, self.ffn_norm, *self.biases.values()]
        if self.head_norms is not None:
            tensors += [self.head_norms.q, self.head_norms.k]
        return sum(matrix.held.nbytes for matrix in matrices) + sum(tensor.nbytes for tensor in tensors)


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
        self._matrix_type = matrix_type
        self._batch_invariant = batch_invariant
        self._shares = [RankShare.of(config, rank, parallel.world_size) for rank in range(parallel.world_size)]
        self.share = self._shares[parallel.rank]
        self.head_dim = config.head_dim
        self.n_heads, self.n_kv_heads = len(self.share.heads), len(self.share.kv_heads)
        self._embeddings = self._empty(config.vocab_size, len(self.share.columns))
        self._norm = self._empty(config.dim)
        self._output = self._matrix("output", len(self.share.vocab), config.dim)
        self._layers = [self._layer(i) for i in range(config.n_layers)]
        self._rotary = rotary_table(config.rope, self.head_dim, max_seq_len, parallel.device)
        self.load(weights)

    def load(self, weights: Iterable[tuple[str, torch.Tensor | GroupedWeight]]) -> None:
        """Copy this rank's part of each weight into its tensor. Weights have Meta's names, and are in `dtype` or in groups. The
        tensors exist from the start, so a graph may be captured before this call."""
        places = self._places()
        for name, weight in weights:
            places[name](weight)

    @property
    def weight_bytes(self) -> int:
        tensors = self._embeddings.nbytes + self._norm.nbytes
        return tensors + self._output.held.nbytes + sum(layer.nbytes for layer in self._layers)

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept beside the weights: the rotary table."""
        return self._rotary.nbytes

    def hidden_states(
        self,
        step: StepTensors,
        slot_tokens: torch.Tensor,
        block_tables: torch.Tensor,
        cache: KVCache,
        attend: Attend,
        clock: StepClock,
    ) -> torch.Tensor:
        """The last layer's normed hidden states [T, dim]. slot_tokens, block_tables: as in `TorchOps.embed`.

        Each layer calls `attend` after it has written its keys and values to the cache. `clock` gets the time in two
        collectives: that of the embeddings, where a rank waits for ranks that began the step later, and those of one layer,
        which stand for all layers because each reading of the clock is a kernel.
        """
        ops, eps = self._ops, self.config.norm_eps
        h, slot_mapping = self._embed(step, slot_tokens, block_tables, cache.keys[0].shape[1], clock)
        x = ops.add_norm(h, None, self._layers[0].attention_norm, eps)
        next_norms = [*(layer.attention_norm for layer in self._layers[1:]), self._norm]
        for i, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            biases, timed = layer.biases, clock if i == len(self._layers) // 2 else None
            qkv = ops.product(x, layer.qkv).view(len(x), -1, self.head_dim)
            arguments = step.positions, slot_mapping, cache.keys[i], cache.values[i]
            q = ops.rotate_and_store(qkv, self._rotary, *arguments, biases.get("qkv"), layer.head_norms)
            x = self._add_product(h, attend(i, q).flatten(1), layer.out, layer.ffn_norm, biases.get("out"), timed)
            gated = ops.gated_product(x, layer.gate_up, biases.get("gate_up"))
            x = self._add_product(h, gated, layer.down, next_norm, biases.get("down"), timed)
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

    def _add_product(
        self,
        hidden_states: torch.Tensor,
        x: torch.Tensor,
        matrix: TorchMatrix,
        norm: torch.Tensor,
        bias: torch.Tensor | None,
        clock: StepClock | None,
    ) -> torch.Tensor:
        """hidden_states += the product, summed over the ranks, + bias; then their norm. clock: gets the time of the sum, times
        the number of layers."""
        eps = self.config.norm_eps
        if self.parallel.world_size == 1:
            return self._ops.add_product_norm(hidden_states, x, matrix, norm, eps, bias)
        waiting = clock.waiting(len(self._layers)) if clock is not None else nullcontext()
        return self._ops.add_norm(hidden_states, self._sum_of_products(x, matrix, waiting), norm, eps, bias)

    def _sum_of_products(
        self, x: torch.Tensor, matrix: TorchMatrix, waiting: AbstractContextManager[None]
    ) -> torch.Tensor:
        """The sum over the ranks, made within `waiting`."""
        partial = matrix.multiply(x)
        with waiting:
            return self._sum(partial)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [R, dim] -> [R, vocab_size] in the model's dtype, whole on every rank."""
        part = self._output.multiply(hidden_states)
        return self.parallel.gather_columns(part, [len(share.vocab) for share in self._shares])

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.parallel.device)

    def _matrix(self, name: str, outputs: int, inputs: int) -> TorchMatrix:
        shape = outputs, inputs, self.dtype, self.parallel.device
        return self._matrix_type(name)(*shape, batch_invariant=self._batch_invariant)

    def _layer(self, i: int) -> Layer:
        config, dim, hidden = self.config, self.config.dim, len(self.share.hidden)
        queries, heads = self.n_heads * self.head_dim, self.n_heads + 2 * self.n_kv_heads
        layer = Layer(
            attention_norm=self._empty(dim),
            qkv=self._matrix(f"layers.{i}.qkv", heads * self.head_dim, dim),
            out=self._matrix(f"layers.{i}.out", dim, queries),
            ffn_norm=self._empty(dim),
            gate_up=self._matrix(f"layers.{i}.gate_up", 2 * hidden, dim),
            down=self._matrix(f"layers.{i}.down", dim, hidden),
        )
        if config.qk_norm:
            layer.head_norms = HeadNorms(self._empty(self.head_dim), self._empty(self.head_dim), config.norm_eps)
        if config.attention_bias:
            layer.biases["qkv"] = self._empty(heads * self.head_dim)
        if config.attention_out_bias:
            layer.biases["out"] = self._empty(dim)
        if config.mlp_bias:
            layer.biases |= {"gate_up": self._empty(2 * hidden), "down": self._empty(dim)}
        return layer

    def _places(self) -> dict[str, Place]:
        """What writes each of the checkpoint's weights into its place."""
        places: dict[str, Place] = {
            "tok_embeddings.weight": self._embeddings.copy_,
            "norm.weight": self._norm.copy_,
            "output.weight": partial(self._output.set_rows, 0),
        }
        for i, layer in enumerate(self._layers):
            places |= {f"layers.{i}.{name}": place for name, place in self._places_of(layer).items()}
        return places

    def _places_of(self, layer: Layer) -> dict[str, Place]:
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        # For each projection of the checkpoint, the field that holds it, and its first output there.
        parts = {
            "attention.wq": ("qkv", 0),
            "attention.wk": ("qkv", queries),
            "attention.wv": ("qkv", queries + keys),
            "attention.wo": ("out", 0),
            "feed_forward.w1": ("gate_up", 0),
            "feed_forward.w2": ("down", 0),
            "feed_forward.w3": ("gate_up", len(self.share.hidden)),
        }
        places: dict[str, Place] = {
            "attention_norm.weight": layer.attention_norm.copy_,
            "ffn_norm.weight": layer.ffn_norm.copy_,
        }
        if layer.head_norms is not None:
            places["attention.q_norm.weight"] = layer.head_norms.q.copy_
            places["attention.k_norm.weight"] = layer.head_norms.k.copy_
        for name, (matrix, first) in parts.items():
            places[f"{name}.weight"] = partial(getattr(layer, matrix).set_rows, first)
            if matrix in layer.biases:
                places[f"{name}.bias"] = _values(layer.biases[matrix], first)
        return places


def _values(target: torch.Tensor, first: int) -> Place:
    return lambda values: target[first : first + len(values)].copy_(values)
