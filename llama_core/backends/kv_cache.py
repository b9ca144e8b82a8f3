"""The KV cache in blocks.

Position p of a sequence lies in block `block_table[p // block_size]` at offset `p % block_size`. Sequences may share the blocks
of a common prefix: one row writes such a block, once, and other rows read it, perhaps in the same step. So in each layer a step
writes all its keys and values before it reads any; the scheduler relies on this.

Where every layer has a sliding window, the blocks outside the longest one may be given to other sequences: a block table has
stale entries there, which no backend reads.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from llama_core.backends.parallel import Parallel
from llama_core.config import EngineConfig
from llama_core.model.config import ModelConfig
from llama_core.model.share import RankShare

# The dtype of a cache of float8_e4m3fn, whose bytes also GPUs without that type can read.
FLOAT8_BYTES: Final = torch.uint8
_FLOAT8_MAX: Final = torch.finfo(torch.float8_e4m3fn).max


def cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Of the cached keys and values of a model that computes in `dtype`."""
    return FLOAT8_BYTES if config.kv_cache_dtype == "fp8" else dtype


def cached_as(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """x as a cache of this dtype holds it; what is larger than the largest float8 becomes the largest."""
    if dtype != FLOAT8_BYTES:
        return x
    return x.float().clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn).view(FLOAT8_BYTES)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of one rank's cache but for its number of blocks."""

    n_layers: int
    block_size: int
    n_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: ModelConfig, block_size: int, parallel: Parallel, dtype: torch.dtype) -> "CacheShape":
        share = RankShare.of(model, parallel.rank, parallel.world_size)
        return cls(len(share.layers), block_size, len(share.kv_heads), model.head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in all layers."""
        return 2 * self.n_layers * self.block_size * self.n_kv_heads * self.head_dim * self.dtype.itemsize

    def allocate(self, num_blocks: int, device: torch.device) -> "KVCache":
        sizes = (self.n_layers, num_blocks, self.block_size, self.n_kv_heads, self.head_dim)
        return KVCache(*(torch.zeros(sizes, dtype=self.dtype, device=device) for _ in range(2)))


class KVCache(NamedTuple):
    """keys, values: [n_layers, num_blocks, block_size, n_local_kv_heads, head_dim]; of one layer without n_layers."""

    keys: torch.Tensor
    values: torch.Tensor

    def layer(self, number: int) -> "KVCache":
        return KVCache(self.keys[number], self.values[number])
