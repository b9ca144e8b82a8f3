"""Keys and values of every running sequence, in blocks; and how one step's tokens find theirs.

A sequence's position p lives in block `table[p // block_size]` at offset `p % block_size`. Sequences may share blocks of
a common beginning: one row writes such a block, once, and others read it, perhaps in the same step. So in each layer a
step writes all its keys and values before it reads any; the scheduler relies on this.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of several tokens: where they stand in the step, and the physical positions of all keys it attends to.

    begin .. end of the step's tokens are positions start .. start + (end - begin) of the sequence.
    keys: int64 [start + (end - begin)].
    """

    begin: int
    end: int
    start: int
    keys: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepLayout:
    """How the T tokens of one step, rows laid end to end, map to the cache.

    positions: int64 [T] in their sequences. write: int64 [T] physical positions of the new keys and values.
    Rows of one token are done together: decode_index int64 [B] into T, decode_tables int64 [B, N] their block tables cut to
    the longest, decode_lengths int64 [B] keys each attends to. The other rows are done one by one.
    """

    positions: torch.Tensor
    write: torch.Tensor
    decode_index: torch.Tensor
    decode_tables: torch.Tensor
    decode_lengths: torch.Tensor
    prefills: list[PrefillRow]


class KVCache:
    """keys, values: [n_layers, num_blocks, block_size, n_local_kv_heads, head_dim]."""

    def __init__(
        self,
        n_layers: int,
        num_blocks: int,
        block_size: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (n_layers, num_blocks, block_size, n_kv_heads, head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_block(n_layers: int, block_size: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * n_layers * block_size * n_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, layout: StepLayout, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the step's keys and values, each [T, n_local_kv_heads, head_dim]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, layout.write, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, layout.write, values)

    def of_decodes(self, layer: int, layout: StepLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the one-token rows, each [B, N * block_size, n_local_kv_heads, head_dim]."""
        tables = layout.decode_tables
        return self.keys[layer][tables].flatten(1, 2), self.values[layer][tables].flatten(1, 2)

    def of_prefill(self, layer: int, row: PrefillRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one row, each [len(row.keys), n_local_kv_heads, head_dim]."""
        return self.keys[layer].flatten(0, 1)[row.keys], self.values[layer].flatten(0, 1)[row.keys]
