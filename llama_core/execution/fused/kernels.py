"""The operations of `ops.py` in Triton: one launch each, two for attention. No launch waits for the host.

A row's result depends neither on the other rows nor on their number: attention splits a row's positions at multiples
of SPLIT, whatever the batch (flash decoding, Dao et al. 2023, with splits of one size).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl

from llama_core.execution.fused.ops import SPLIT, HeadNorms
from llama_core.model_config import FULL_ATTENTION

TILE = 32  # cached positions that attention reads at a time
_MIN_DOT = 16  # the smallest side of a matrix product on tensor cores


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


@triton.jit
def _first_seen(length, window: tl.constexpr):
    """The first position that the last of `length` positions attends to."""
    if window:
        return tl.maximum(length - window, 0)
    return length * 0


# Without `do_not_specialize`, Triton compiles further variants for some numbers of blocks while it serves.
@triton.jit(do_not_specialize=["block_table_stride", "n_splits"])
def _attend_split(
    q,
    keys,
    values,
    block_tables,
    lengths,
    partial,
    log_sums,
    scale,
    q_stride,
    block_table_stride,
    n_splits,
    n_kv_heads,
    group: tl.constexpr,
    group_block: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    split_size: tl.constexpr,
    tile: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    seen = _first_seen(length, window)
    begin = (seen // split_size + split) * split_size
    if begin < length:
        member = tl.arange(0, group_block)
        dim = tl.arange(0, dim_block)
        head = (row * n_kv_heads + kv_head) * group + member
        is_member, in_dim = member < group, dim < head_dim
        is_query = is_member[:, None] & in_dim[None, :]
        asked = q + row * q_stride + (kv_head * group + member)[:, None] * head_dim + dim[None, :]
        query = tl.load(asked, mask=is_query, other=0.0)
        best = tl.full([group_block], float("-inf"), tl.float32)
        total = tl.zeros([group_block], tl.float32)
        mixed = tl.zeros([group_block, dim_block], tl.float32)
        # Of the first split, tiles before the window are skipped.
        start = tl.maximum(begin, seen // tile * tile)
        for first in range(start, tl.minimum(begin + split_size, length), tile):
            position = first + tl.arange(0, tile)
            known = (position >= seen) & (position < length)
            block = tl.load(block_tables + row * block_table_stride + position // block_size, mask=known, other=0)
            place = ((block * block_size + position % block_size) * n_kv_heads + kv_head) * head_dim
            at = place[:, None] + dim[None, :]
            is_known = known[:, None] & in_dim[None, :]
            key = tl.load(keys + at, mask=is_known, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            scores = tl.where(known[None, :], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, axis=1))
            weights = tl.exp(scores - higher[:, None])
            kept = tl.exp(best - higher)
            value = tl.load(values + at, mask=is_known, other=0.0)
            mixed = mixed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            total = total * kept + tl.sum(weights, axis=1)
            best = higher
        out = head * n_splits + split
        tl.store(partial + out[:, None] * head_dim + dim[None, :], mixed / total[:, None], mask=is_query)
        tl.store(log_sums + out, best + tl.log(total), mask=is_member)


@triton.jit(do_not_specialize=["n_splits"])
def _combine_splits(
    partial,
    log_sums,
    lengths,
    out,
    n_splits,
    n_heads,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    window: tl.constexpr,
    split_size: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, dim_block)
    in_dim = dim < head_dim
    first = (row * n_heads + head) * n_splits
    length = tl.load(lengths + row)
    used = tl.cdiv(length, split_size) - _first_seen(length, window) // split_size
    best = tl.load(log_sums + first)
    total = best * 0.0 + 1.0
    mixed = tl.load(partial + first * head_dim + dim, mask=in_dim, other=0.0)
    for split in range(1, used):
        log_sum = tl.load(log_sums + first + split)
        higher = tl.maximum(best, log_sum)
        kept, weight = tl.exp(best - higher), tl.exp(log_sum - higher)
        mixed = mixed * kept + tl.load(partial + (first + split) * head_dim + dim, mask=in_dim, other=0.0) * weight
        total = total * kept + weight
        best = higher
    tl.store(out + (row * n_heads + head) * head_dim + dim, (mixed / total).to(out.dtype.element_ty), mask=in_dim)


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

    def attend_decodes(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        block_tables: torch.Tensor,
        lengths: torch.Tensor,
        window: int = FULL_ATTENTION,
    ) -> torch.Tensor:
        rows, n_heads, head_dim = q.shape
        block_size, n_kv_heads = keys.shape[1:3]
        group = n_heads // n_kv_heads
        n_splits = triton.cdiv(block_tables.shape[1] * block_size, SPLIT)
        if window:
            n_splits = min(n_splits, (window + SPLIT - 2) // SPLIT + 1)  # splits that one window touches at most
        partial = torch.empty((rows, n_heads, n_splits, head_dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty((rows, n_heads, n_splits), dtype=torch.float32, device=q.device)
        dim_block = max(_MIN_DOT, triton.next_power_of_2(head_dim))
        _attend_split[(rows, n_kv_heads, n_splits)](
            q,
            keys,
            values,
            block_tables,
            lengths,
            partial,
            log_sums,
            head_dim**-0.5,
            q.stride(0),
            block_tables.stride(0),
            n_splits,
            n_kv_heads,
            group=group,
            group_block=max(_MIN_DOT, triton.next_power_of_2(group)),
            head_dim=head_dim,
            dim_block=dim_block,
            block_size=block_size,
            window=window,
            split_size=SPLIT,
            tile=TILE,
        )
        out = torch.empty((rows, n_heads, head_dim), dtype=q.dtype, device=q.device)
        _combine_splits[(rows, n_heads)](
            partial,
            log_sums,
            lengths,
            out,
            n_splits,
            n_heads,
            head_dim=head_dim,
            dim_block=dim_block,
            window=window,
            split_size=SPLIT,
            num_warps=1,
        )
        return out

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
