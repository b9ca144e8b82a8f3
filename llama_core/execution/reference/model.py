"""The sharded Transformer of Llama 2 on fairscale's model-parallel layers, for inference.

T is the number of tokens in a step: rows of different sequences concatenated, each token with its own position.
Formulas: RMSNorm (Zhang and Sennrich 2019), rotary embedding (`rotary.py`), grouped-query attention (Ainslie et al. 2023),
SwiGLU (Shazeer 2020); names of parameters are those of Meta's checkpoints.
"""

from unittest.mock import patch

import torch
import torch.nn.functional as F
from fairscale.nn.model_parallel import layers as fairscale_layers
from fairscale.nn.model_parallel.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from torch import nn

from llama_core.execution.attention import attend_decodes, attend_prefill
from llama_core.execution.kv_cache import AttentionMetadata, KVCache
from llama_core.execution.rotary import rotary_table, rotate
from llama_core.model_config import ModelConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the mean in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, device="meta"), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.type_as(x) * self.weight


class Attention(nn.Module):
    """Grouped-query attention over the paged cache; this rank has 1 / world_size of the heads."""

    def __init__(self, config: ModelConfig, world_size: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.n_heads = config.n_heads // world_size
        self.n_kv_heads = config.n_kv_heads // world_size
        self.wq = _column(config.dim, config.n_heads * config.head_dim)
        self.wk = _column(config.dim, config.n_kv_heads * config.head_dim)
        self.wv = _column(config.dim, config.n_kv_heads * config.head_dim)
        self.wo = _row(config.n_heads * config.head_dim, config.dim)

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, dim] -> [T, dim]."""
        q = rotate(self.wq(x).view(-1, self.n_heads, self.head_dim), table)
        k = rotate(self.wk(x).view(-1, self.n_kv_heads, self.head_dim), table)
        v = self.wv(x).view(-1, self.n_kv_heads, self.head_dim)
        cache.store(self.layer, metadata, k, v)
        out = torch.empty_like(q)
        if metadata.decode_index.numel():
            keys, values = cache.of_decodes(self.layer, metadata)
            out[metadata.decode_index] = attend_decodes(q[metadata.decode_index], keys, values, metadata.decode_lengths)
        for row in metadata.prefills:
            keys, values = cache.of_prefill(self.layer, row)
            out[row.begin : row.end] = attend_prefill(q[row.begin : row.end], keys, values, row.start)
        result: torch.Tensor = self.wo(out.flatten(1))
        return result


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = _column(config.dim, config.hidden_dim)
        self.w2 = _row(config.hidden_dim, config.dim)
        self.w3 = _column(config.dim, config.hidden_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return result


class TransformerBlock(nn.Module):
    def __init__(self, config: ModelConfig, world_size: int, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, world_size, layer)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        h: torch.Tensor = x + self.attention(self.attention_norm(x), table, cache, metadata)
        out: torch.Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Transformer(nn.Module):
    """Built without memory for its weights: `load_state_dict(..., assign=True)` assigns them, on their device."""

    def __init__(self, config: ModelConfig, world_size: int, max_seq_len: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        # fairscale would initialize every full weight on every rank and keep a slice, which the checkpoint then replaces.
        with patch.object(fairscale_layers, "_initialize_affine_weight", lambda *args, **kwargs: None):
            self.tok_embeddings = _weightless(ParallelEmbedding(config.vocab_size, config.dim))
            self.layers = nn.ModuleList(TransformerBlock(config, world_size, i) for i in range(config.n_layers))
            self.norm = RMSNorm(config.dim, config.norm_eps)
            self.output = _column(config.dim, config.vocab_size, gather_output=True)
        self.rotary = rotary_table(config.head_dim, max_seq_len, config.rope_theta, device)

    def forward(self, tokens: torch.Tensor, cache: KVCache, metadata: AttentionMetadata) -> torch.Tensor:
        """tokens int64 [T] -> the last layer's normed hidden states [T, dim]. Writes the cache."""
        h = self.tok_embeddings(tokens)
        table = self.rotary[metadata.positions]
        for layer in self.layers:
            h = layer(h, table, cache, metadata)
        hidden_states: torch.Tensor = self.norm(h)
        return hidden_states

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states [R, dim] -> float32 [R, vocab_size], whole on every rank."""
        logits: torch.Tensor = self.output(hidden_states).float()
        return logits


def _weightless(layer: nn.Module) -> nn.Module:
    layer.weight = nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)  # type: ignore[arg-type]
    return layer


def _column(in_features: int, out_features: int, gather_output: bool = False) -> nn.Module:
    return _weightless(ColumnParallelLinear(in_features, out_features, bias=False, gather_output=gather_output))


def _row(in_features: int, out_features: int) -> nn.Module:
    return _weightless(RowParallelLinear(in_features, out_features, bias=False, input_is_parallel=True))
