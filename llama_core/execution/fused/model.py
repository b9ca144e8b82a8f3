"""This rank's share of the Transformer as plain tensors: projections of one input are one matrix, and no call waits.

The same model as `reference/model.py`, whose layers are fairscale's. This one owns its weights and its collectives, so that a
whole step can be captured in a CUDA graph.
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
from llama_core.model_config import ModelConfig

# (layer, queries [T, H, head_dim]) -> [T, H, head_dim]
Attend = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class Layer:
    """qkv [(H + 2 K) head_dim, dim], out [dim, H head_dim], gate_up [2 hidden, dim], down [dim, hidden] of this rank."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class FusedTransformer:
    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallel,
        max_seq_len: int,
        dtype: torch.dtype,
        ops: Ops,
        weights: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """`weights`: this rank's part of each, by Meta's names, in `dtype`. Each is copied into its tensor and not kept."""
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

        self._embeddings = empty(config.vocab_size, config.dim // ranks)
        self._norm = empty(config.dim)
        self._output = empty(config.vocab_size // ranks, config.dim)
        self._layers = [
            Layer(
                attention_norm=empty(config.dim),
                qkv=empty((self.n_heads + 2 * self.n_kv_heads) * self.head_dim, config.dim),
                out=empty(config.dim, self.n_heads * self.head_dim),
                ffn_norm=empty(config.dim),
                gate_up=empty(2 * hidden, config.dim),
                down=empty(config.dim, hidden),
            )
            for _ in range(config.n_layers)
        ]
        self._rotary = rotary_table(self.head_dim, max_seq_len, config.rope_theta, parallel.device)
        places = self._places()
        for name, weight in weights:
            places[name].copy_(weight)

    @property
    def weight_bytes(self) -> int:
        return sum(place.nbytes for place in self._places().values())

    def hidden_states(
        self, tokens: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, cache: KVCache, attend: Attend
    ) -> torch.Tensor:
        """The last layer's normed hidden states [T, dim]. tokens, positions, slot_mapping (physical positions in the cache):
        int64 [T].

        `attend` is called in each layer when its keys and values are in the cache.
        """
        ops, eps = self._ops, self.config.norm_eps
        h = self._gather(F.embedding(tokens, self._embeddings))
        delta: torch.Tensor | None = None
        for i, layer in enumerate(self._layers):
            x = ops.add_norm(h, delta, layer.attention_norm, eps)
            qkv = F.linear(x, layer.qkv).view(len(x), -1, self.head_dim)
            q = ops.rotate_and_store(qkv, self._rotary, positions, slot_mapping, cache.keys[i], cache.values[i])
            delta = self._sum(F.linear(attend(i, q).flatten(1), layer.out))
            x = ops.add_norm(h, delta, layer.ffn_norm, eps)
            delta = self._sum(F.linear(ops.gated_silu(F.linear(x, layer.gate_up)), layer.down))
        return ops.add_norm(h, delta, self._norm, eps)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [R, dim] -> float32 [R, vocab_size], whole on every rank."""
        return self._gather(F.linear(hidden_states, self._output)).float()

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

    def _places(self) -> dict[str, torch.Tensor]:
        """The tensor, or the part of one, for each of the checkpoint's tensors."""
        places = {
            "tok_embeddings.weight": self._embeddings,
            "norm.weight": self._norm,
            "output.weight": self._output,
        }
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        for i, layer in enumerate(self._layers):
            wq, wk, wv = layer.qkv.split([queries, keys, keys])  # type: ignore[no-untyped-call]
            w1, w3 = layer.gate_up.chunk(2)
            named = {
                "attention_norm": layer.attention_norm,
                "attention.wq": wq,
                "attention.wk": wk,
                "attention.wv": wv,
                "attention.wo": layer.out,
                "ffn_norm": layer.ffn_norm,
                "feed_forward.w1": w1,
                "feed_forward.w2": layer.down,
                "feed_forward.w3": w3,
            }
            places |= {f"layers.{i}.{name}.weight": place for name, place in named.items()}
        return places
