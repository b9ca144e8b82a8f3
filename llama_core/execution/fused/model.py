"""One rank's part of the Transformer in plain tensors. Projections of one input are one matrix, and no call waits.

The same model as `reference/model.py`, which uses fairscale's layers. This model owns its weights and its collectives, so that
a CUDA graph can capture a whole step.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from llama_core.execution.fused.ops import Ops
from llama_core.execution.kv_cache import KVCache
from llama_core.execution.parallel import Parallel
from llama_core.execution.rotary import rotary_table
from llama_core.execution.weight_formats.format import TorchMatrix, TorchMatrixType
from llama_core.model_config import ModelConfig

# (layer, queries [T, H, head_dim]) -> [T, H, head_dim]
Attend = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Layer:
    """qkv [(H + 2 K) head_dim, dim], out [dim, H head_dim], gate_up [2 hidden, dim], down [dim, hidden] of this rank."""

    attention_norm: torch.Tensor
    qkv: TorchMatrix
    out: TorchMatrix
    ffn_norm: torch.Tensor
    gate_up: TorchMatrix
    down: TorchMatrix


class FusedTransformer:
    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallel,
        max_seq_len: int,
        dtype: torch.dtype,
        ops: Ops,
        make_matrix: TorchMatrixType,
        weights: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """`make_matrix`: allocates the matrix of a linear layer. `weights`: this rank's part of each, by Meta's names, in
        `dtype`; the model copies each into place and does not keep it."""
        self.config = config
        self.dtype = dtype
        self.parallel = parallel
        self._ops = ops
        ranks = parallel.world_size
        self.head_dim = config.head_dim
        self.n_heads = config.n_heads // ranks
        self.n_kv_heads = config.n_kv_heads // ranks
        hidden = config.hidden_dim // ranks

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=parallel.device)

        def matrix(outputs: int, inputs: int) -> TorchMatrix:
            return make_matrix(outputs, inputs, dtype, parallel.device)

        self._embeddings = empty(config.vocab_size, config.dim // ranks)
        self._norm = empty(config.dim)
        self._output = matrix(config.vocab_size // ranks, config.dim)
        self._layers = [
            Layer(
                attention_norm=empty(config.dim),
                qkv=matrix((self.n_heads + 2 * self.n_kv_heads) * self.head_dim, config.dim),
                out=matrix(config.dim, self.n_heads * self.head_dim),
                ffn_norm=empty(config.dim),
                gate_up=matrix(2 * hidden, config.dim),
                down=matrix(config.dim, hidden),
            )
            for _ in range(config.n_layers)
        ]
        self._rotary = rotary_table(self.head_dim, max_seq_len, config.rope_theta, parallel.device)
        places = self._places()
        for name, weight in weights:
            places[name](weight)

    @property
    def weight_bytes(self) -> int:
        parts: list[torch.Tensor | TorchMatrix] = [self._embeddings, self._norm, self._output]
        for layer in self._layers:
            parts += [layer.attention_norm, layer.qkv, layer.out, layer.ffn_norm, layer.gate_up, layer.down]
        return sum(part.nbytes for part in parts)

    def hidden_states(
        self, tokens: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, cache: KVCache, attend: Attend
    ) -> torch.Tensor:
        """The last layer's normed hidden states [T, dim]. tokens, positions, slot_mapping (physical positions in the cache):
        int64 [T].

        Each layer calls `attend` after it has written its keys and values to the cache.
        """
        ops, eps = self._ops, self.config.norm_eps
        h = self._gather(F.embedding(tokens, self._embeddings))
        delta: torch.Tensor | None = None
        for i, layer in enumerate(self._layers):
            x = ops.add_norm(h, delta, layer.attention_norm, eps)
            qkv = layer.qkv.multiply(x).view(len(x), -1, self.head_dim)
            q = ops.rotate_and_store(qkv, self._rotary, positions, slot_mapping, cache.keys[i], cache.values[i])
            delta = self._sum(layer.out.multiply(attend(i, q).flatten(1)))
            x = ops.add_norm(h, delta, layer.ffn_norm, eps)
            delta = self._sum(layer.down.multiply(ops.gated_silu(layer.gate_up.multiply(x))))
        return ops.add_norm(h, delta, self._norm, eps)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [R, dim] -> float32 [R, vocab_size], whole on every rank."""
        return self._gather(self._output.multiply(hidden_states)).float()

    def _sum(self, partial: torch.Tensor) -> torch.Tensor:
        if self.parallel.world_size > 1:
            dist.all_reduce(partial)
        return partial

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        """Each rank's columns [T, n / ranks], side by side [T, n]."""
        ranks = self.parallel.world_size
        if ranks == 1:
            return part
        count, width = part.shape
        parts = torch.empty((ranks * count, width), dtype=part.dtype, device=part.device)
        dist.all_gather_into_tensor(parts, part.contiguous())
        return parts.view(ranks, count, width).transpose(0, 1).flatten(1)

    def _places(self) -> dict[str, Callable[[torch.Tensor], object]]:
        """What writes each of the checkpoint's weights into its place."""

        def rows(matrix: TorchMatrix, first: int = 0) -> Callable[[torch.Tensor], object]:
            return lambda weight: matrix.set_rows(first, weight)

        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        hidden = self.config.hidden_dim // self.parallel.world_size
        places: dict[str, Callable[[torch.Tensor], object]] = {
            "tok_embeddings.weight": self._embeddings.copy_,
            "norm.weight": self._norm.copy_,
            "output.weight": rows(self._output),
        }
        for i, layer in enumerate(self._layers):
            named = {
                "attention_norm": layer.attention_norm.copy_,
                "attention.wq": rows(layer.qkv),
                "attention.wk": rows(layer.qkv, queries),
                "attention.wv": rows(layer.qkv, queries + keys),
                "attention.wo": rows(layer.out),
                "ffn_norm": layer.ffn_norm.copy_,
                "feed_forward.w1": rows(layer.gate_up),
                "feed_forward.w2": rows(layer.down),
                "feed_forward.w3": rows(layer.gate_up, hidden),
            }
            places |= {f"layers.{i}.{name}.weight": place for name, place in named.items()}
        return places
