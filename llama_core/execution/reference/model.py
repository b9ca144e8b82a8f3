"""The sharded Transformer of the Llama family in plain torch, for inference.

T is the number of tokens in a step: rows of different sequences concatenated, each token with its own position.
Formulas: RMSNorm (Zhang and Sennrich 2019), rotary embedding (`rotary.py`), grouped-query attention (Ainslie et al. 2023),
SwiGLU (Shazeer 2020), sliding windows (Beltagy et al. 2020); names of parameters are those of Meta's checkpoints.
"""

import torch
import torch.nn.functional as F
from torch import nn

from llama_core.checkpoint.rank_share import RankShare, is_even
from llama_core.execution.attention import attend_decodes, attend_prefills
from llama_core.execution.kv_cache import AttentionMetadata, KVCache
from llama_core.execution.parallel import Parallel
from llama_core.execution.reference.layers import LayerTypes, OwnLayerTypes
from llama_core.execution.reference.stopwatch import Stopwatch, stopwatch_of
from llama_core.execution.rotary import rotary_table, rotate
from llama_core.model_config import ModelConfig


def layer_types(config: ModelConfig, parallel: Parallel, collectives: Stopwatch) -> LayerTypes:
    """fairscale's layers, as in Meta's reference, where all ranks have equal parts; else our own."""
    if not is_even(config, parallel.world_size):
        return OwnLayerTypes(config, parallel, collectives)
    from llama_core.execution.reference.fairscale_layers import FairscaleLayerTypes

    return FairscaleLayerTypes(config, parallel, collectives)


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
    """Grouped-query attention over the paged cache; this rank has the heads of its share."""

    def __init__(self, config: ModelConfig, share: RankShare, types: LayerTypes, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.window(layer)
        self.head_dim = config.head_dim
        own_queries, own_keys = (len(heads) * config.head_dim for heads in (share.heads, share.kv_heads))
        self.wq = types.column(config.dim, config.query_width, own_queries, bias=config.attention_bias)
        self.wk = types.column(config.dim, config.kv_width, own_keys, bias=config.attention_bias)
        self.wv = types.column(config.dim, config.kv_width, own_keys, bias=config.attention_bias)
        self.wo = types.row(config.query_width, own_queries, config.dim, bias=config.attention_out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """x [T, dim] -> [T, dim]."""
        q, k, v = (project(x).view(len(x), -1, self.head_dim) for project in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q, table)
        cache.store(self.layer, metadata, rotate(k, table), v)
        out = torch.empty_like(q)
        if metadata.decode_index.numel():
            out[metadata.decode_index] = attend_decodes(
                q[metadata.decode_index],
                cache.keys[self.layer],
                cache.values[self.layer],
                metadata.decode_block_tables,
                metadata.decode_lengths,
                self.window,
            )
        attend_prefills(out, q, cache, self.layer, metadata, self.window)
        result: torch.Tensor = self.wo(out.flatten(1))
        return result


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, share: RankShare, types: LayerTypes) -> None:
        super().__init__()
        hidden, own = config.hidden_dim, len(share.hidden)
        self.w1 = types.column(config.dim, hidden, own, bias=config.mlp_bias)
        self.w2 = types.row(hidden, own, config.dim, bias=config.mlp_bias)
        self.w3 = types.column(config.dim, hidden, own, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return result


class TransformerBlock(nn.Module):
    def __init__(self, config: ModelConfig, share: RankShare, types: LayerTypes, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, share, types, layer)
        self.feed_forward = FeedForward(config, share, types)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        h: torch.Tensor = x + self.attention(self.attention_norm(x), table, cache, metadata)
        out: torch.Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Transformer(nn.Module):
    """Built without memory for its weights: `load_state_dict(..., assign=True)` assigns them, on their device.

    collectives: times those of the layers.
    """

    def __init__(self, config: ModelConfig, parallel: Parallel, max_seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.collectives = stopwatch_of(parallel.device)
        types = layer_types(config, parallel, self.collectives)
        share = RankShare.of(config, parallel.rank, parallel.world_size)
        self.tok_embeddings = types.embedding()
        self.layers = nn.ModuleList(TransformerBlock(config, share, types, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = types.output()
        self.rotary = rotary_table(config.rope, config.head_dim, max_seq_len, parallel.device)

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
