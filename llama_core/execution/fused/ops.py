"""The operations of a layer between its matrix products, in torch for any device; `kernels.py` has them for CUDA."""

from typing import Protocol

import torch
import torch.nn.functional as F

from llama_core.execution.attention import attend_decodes
from llama_core.execution.rotary import rotate

SPLIT = 128  # cached positions that one program of the attention kernel reads


class Ops(Protocol):
    """T tokens of a step, B rows of one token. H and K: query and key/value heads of this rank."""

    def add_norm(
        self, hidden_states: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """hidden_states [T, dim] += delta, in place; then RMSNorm of it, a new tensor."""

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Queries [T, H, head_dim], rotated by their positions, of qkv [T, H + 2 K, head_dim], which may be overwritten.

        Keys, rotated likewise, and values are stored at the physical positions `slot_mapping` int64 [T] of one layer's cache,
        each [num_blocks, block_size, K, head_dim]. table: `rotary_table`. positions: int64 [T].
        """

    def attend_decodes(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """q [B, H, head_dim] -> the same: each attends to the first lengths[i] positions of its blocks.

        block_tables: int64 [B, N] block numbers, lengths: int64 [B], at least 1. keys, values: one layer's cache.
        """

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for gate_up [T, 2 * hidden], gate first: [T, hidden]."""


class TorchOps:
    """The operations in torch, which define the results of the Triton kernels."""

    def add_norm(
        self, hidden_states: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if delta is not None:
            hidden_states += delta
        wide = hidden_states.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return normed.type_as(hidden_states) * weight

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        n_kv_heads = keys.shape[2]
        n_heads = qkv.shape[1] - 2 * n_kv_heads
        turned = rotate(qkv[:, :-n_kv_heads], table[positions])
        keys.flatten(0, 1).index_copy_(0, slot_mapping, turned[:, n_heads:])
        values.flatten(0, 1).index_copy_(0, slot_mapping, qkv[:, -n_kv_heads:])
        return turned[:, :n_heads]

    def attend_decodes(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        return attend_decodes(q, keys[block_tables].flatten(1, 2), values[block_tables].flatten(1, 2), lengths)

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
