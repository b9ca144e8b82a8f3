"""The operations of `ops.py` in Triton. No launch waits for the host, and no row's result depends on the other rows."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl

from llama_core.execution.fused.attention_kernels import attend, tile_sizes
from llama_core.execution.fused.ops import HeadNorms
from llama_core.execution.fused.step_plan import AttentionTiles, TileSizes
from llama_core.model_config import FULL_ATTENTION


@triton.jit
def _plus_bias(x, bias, inside):
    return (x.to(tl.float32) + tl.load(bias, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)


@triton.jit
def _times(x, factor, inside):
    return (x.to(tl.float32) * tl.load(factor, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)


@triton.jit
def _add_norm(
    hidden_states,
    delta,
    bias,
    weight,
    out,
    dim,
    eps,
    has_delta: tl.constexpr,
    has_bias: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * dim
    column = tl.arange(0, block)
    inside = column < dim
    x = tl.load(hidden_states + row + column, mask=inside, other=0.0)
    if has_delta:
        added = tl.load(delta + row + column, mask=inside, other=0.0)
        if has_bias:
            added = _plus_bias(added, bias + column, inside)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(hidden_states + row + column, x, mask=inside)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / dim + eps)).to(x.dtype)
    tl.store(out + row + column, _times(normed, weight + column, inside), mask=inside)


@triton.jit
def _rotate_and_store(
    qkv,
    table,
    positions,
    slot_mapping,
    keys,
    values,
    bias,
    q_norm,
    k_norm,
    eps,
    n_heads,
    n_kv_heads,
    has_bias: tl.constexpr,
    has_norms: tl.constexpr,
    head_dim: tl.constexpr,
    half_block: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, half_block)
    inside = pair < head_dim // 2
    source = qkv + (token * (n_heads + 2 * n_kv_heads) + head) * head_dim + 2 * pair
    even = tl.load(source, mask=inside, other=0.0)
    odd = tl.load(source + 1, mask=inside, other=0.0)
    if has_bias:
        even = _plus_bias(even, bias + head * head_dim + 2 * pair, inside)
        odd = _plus_bias(odd, bias + head * head_dim + 2 * pair + 1, inside)
    place = tl.load(slot_mapping + token) * n_kv_heads * head_dim + 2 * pair
    if head < n_heads + n_kv_heads:
        if has_norms:
            factor = (q_norm if head < n_heads else k_norm) + 2 * pair
            wide_even, wide_odd = even.to(tl.float32), odd.to(tl.float32)
            squares = tl.sum(wide_even * wide_even, axis=0) + tl.sum(wide_odd * wide_odd, axis=0)
            scale = tl.rsqrt(squares / head_dim + eps)
            even = _times((wide_even * scale).to(even.dtype), factor, inside)
            odd = _times((wide_odd * scale).to(odd.dtype), factor + 1, inside)
        angle = table + tl.load(positions + token) * head_dim + 2 * pair
        cos = tl.load(angle, mask=inside, other=0.0)
        sin = tl.load(angle + 1, mask=inside, other=0.0)
        wide_even, wide_odd = even.to(tl.float32), odd.to(tl.float32)
        turned_even = (wide_even * cos - wide_odd * sin).to(even.dtype)
        turned_odd = (wide_even * sin + wide_odd * cos).to(even.dtype)
        target = source
        if head >= n_heads:
            target = keys + place + (head - n_heads) * head_dim
        tl.store(target, turned_even, mask=inside)
        tl.store(target + 1, turned_odd, mask=inside)
    else:
        target = values + place + (head - n_heads - n_kv_heads) * head_dim
        tl.store(target, even, mask=inside)
        tl.store(target + 1, odd, mask=inside)


@triton.jit
def _gated_silu(gate_up, bias, out, hidden, has_bias: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < hidden
    gate = tl.load(gate_up + row * 2 * hidden + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * hidden + hidden + column, mask=inside, other=0.0)
    if has_bias:
        gate = _plus_bias(gate, bias + column, inside)
        up = _plus_bias(up, bias + hidden + column, inside)
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * hidden + column, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


class TritonOps:
    """See `ops.Ops`. All tensors lie on the device; rows, and heads in a row, are contiguous.

    Kernels get some other tensor in place of one that is None; they do not read it.
    """

    def add_norm(
        self,
        hidden_states: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(hidden_states)
        count, dim = hidden_states.shape
        _add_norm[(count,)](
            hidden_states,
            hidden_states if delta is None else delta,
            weight if bias is None else bias,
            weight,
            out,
            dim,
            eps,
            has_delta=delta is not None,
            has_bias=bias is not None,
            block=triton.next_power_of_2(dim),
        )
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        table: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        count, total_heads, head_dim = qkv.shape
        n_kv_heads = keys.shape[2]
        n_heads = total_heads - 2 * n_kv_heads
        q_norm, k_norm, eps = norms or (qkv, qkv, 0.0)
        _rotate_and_store[(count, total_heads)](
            qkv,
            table,
            positions,
            slot_mapping,
            keys,
            values,
            qkv if bias is None else bias,
            q_norm,
            k_norm,
            eps,
            n_heads,
            n_kv_heads,
            has_bias=bias is not None,
            has_norms=norms is not None,
            head_dim=head_dim,
            half_block=triton.next_power_of_2(head_dim // 2),
            num_warps=1,
        )
        return qkv[:, :n_heads]

    def tile_sizes(self, n_heads: int, n_kv_heads: int, head_dim: int, dtype: torch.dtype) -> TileSizes:
        return tile_sizes(n_heads, n_kv_heads, head_dim, dtype)

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_tables: torch.Tensor,
        tiles: AttentionTiles,
        split_size: int,
        window: int = FULL_ATTENTION,
    ) -> torch.Tensor:
        return attend(q, keys, values, block_tables, tiles, split_size, window)

    def gated_silu(self, gate_up: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        count, width = gate_up.shape
        hidden = width // 2
        out = torch.empty((count, hidden), dtype=gate_up.dtype, device=gate_up.device)
        block = min(1024, triton.next_power_of_2(hidden))
        has_bias = bias is not None
        _gated_silu[(count, triton.cdiv(hidden, block))](
            gate_up, bias if has_bias else gate_up, out, hidden, has_bias=has_bias, block=block
        )
        return out
