"""A one-shot all-reduce: the sum of all ranks' parts of a product, added to the hidden states and normed, in one kernel.

Every rank writes its part to a buffer that its peers can read (`peer_memory.py`), signals the peers, waits for their signals,
and reads all parts itself. Parts are added in float32 in the order of the ranks, so all ranks have the same bits,
whatever the number of rows. Where the buffers have a multicast address, NVLink's switch adds them in float32, in an order of
its own, and a rank reads the sum. Ranks may then differ by rounding: rank 0 alone samples.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl

from llama_core.execution.fused.kernel_functions import norm_warps, plus_bias, store_norm
from llama_core.execution.fused.peer_memory import PeerMemory


@triton.jit
def _row_of(buffers, rank, place, dtype: tl.constexpr, block: tl.constexpr, is_aligned: tl.constexpr):
    """Pointers to a row in a rank's buffer, `place` bytes behind its start.

    is_aligned: rows begin at multiples of 16 bytes, which the compiler does not see in an address that it loads.
    """
    row = (tl.load(buffers + rank) + place).to(tl.pointer_type(dtype)) + tl.arange(0, block)
    if is_aligned:
        row = tl.max_contiguous(tl.multiple_of(row, 16), block)
    return row


@triton.jit
def _meet(signals, epochs, row, rank, polls, world: tl.constexpr, world_block: tl.constexpr):
    """A barrier of all ranks for this row. What a rank wrote before the barrier, every rank can read after it. Returns whether
    all ranks arrived within `polls` reads of their signals.

    A rank counts its barriers of a row in `epochs` and writes the count as its signal. Signals only grow: none is reset, and a
    signal that arrives early stays valid.
    """
    peer = tl.arange(0, world_block)
    is_peer = peer < world
    epoch = tl.load(epochs + row) + 1
    # The writes of all threads must come before the signal, which one thread stores.
    tl.debug_barrier()
    theirs = tl.load(signals + peer, mask=is_peer, other=0) + (row * world + rank) * 8
    tl.atomic_xchg(theirs.to(tl.pointer_type(tl.int64)), epoch, mask=is_peer, sem="release", scope="sys")
    own = (tl.load(signals + rank) + row * world * 8).to(tl.pointer_type(tl.int64)) + peer
    seen = tl.atomic_add(own, 0, mask=is_peer, sem="acquire", scope="sys")
    while (tl.min(tl.where(is_peer, seen, epoch), axis=0) < epoch) & (polls > 0):
        seen = tl.atomic_add(own, 0, mask=is_peer, sem="acquire", scope="sys")
        polls -= 1
    # Only some threads have polled; this barrier holds the others until then.
    tl.debug_barrier()
    tl.store(epochs + row, epoch)
    return tl.min(tl.where(is_peer, seen, epoch), axis=0) >= epoch


# In $0 to $3: the sums of 16 bytes at a multicast address, or zeros where $5 is 0 (PTX ISA, "multimem.ld_reduce").
_ADD_BFLOAT16 = tl.constexpr("""{
    .reg .pred p;
    setp.ne.s32 p, $5, 0;
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
    @p multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];
}""")
_ADD_FLOAT32 = tl.constexpr("""{
    .reg .pred p;
    setp.ne.s32 p, $5, 0;
    mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
    @p multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];
}""")


@triton.jit
def _add_at(address, inside, dtype: tl.constexpr):
    """Four words of 32 bits for each multicast address: the sum of the 16 bytes that all ranks hold there.

    Ranks wrote at their buffers' own addresses, so a fence must come before this read (PTX ISA, "Causality order": proxies).
    """
    tl.inline_asm_elementwise("fence.proxy.alias; mov.b32 $0, 0;", "=r,r", [tl.program_id(0)], tl.int32, False, 1)
    given = inside.to(tl.int32)
    if dtype == tl.float32:
        words = tl.inline_asm_elementwise(
            asm=_ADD_FLOAT32,
            constraints="=&f,=&f,=&f,=&f,l,r",
            args=[address, given],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        words = tl.inline_asm_elementwise(
            asm=_ADD_BFLOAT16,
            constraints="=&r,=&r,=&r,=&r,l,r",
            args=[address, given],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return words


@triton.jit
def _in_order(words, dtype: tl.constexpr, block: tl.constexpr):
    """float32 [block] of the four words of each vector: of float32, or of pairs of bfloat16."""
    values = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    if dtype != tl.float32:
        # The upper 16 bits of a float32 are a bfloat16; the first of a pair is in the lower half.
        first, second = (values << 16).to(tl.float32, bitcast=True), (values & -65536).to(tl.float32, bitcast=True)
        values = tl.join(first, second)
    return tl.reshape(values, (block,))


@triton.jit
def _switch_sum(address, dim, dtype: tl.constexpr, block: tl.constexpr):
    """float32 [block]: the sum of the rows [dim] that all ranks hold at a multicast address."""
    values: tl.constexpr = 128 // dtype.primitive_bitwidth
    vector = tl.arange(0, block // values)
    words = _add_at(address + vector * 16, vector * values < dim, dtype)
    return _in_order(words, dtype, block)


@triton.jit
def _sum_add_norm(
    hidden_states,
    partial,
    bias,
    weight,
    out,
    buffers,
    signals,
    multicast,
    epochs,
    polls,
    missed,
    rank,
    first_byte,
    dim,
    eps,
    uses_switch: tl.constexpr,
    has_bias: tl.constexpr,
    is_aligned: tl.constexpr,
    world: tl.constexpr,
    world_block: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < dim
    dtype: tl.constexpr = partial.dtype.element_ty
    place = first_byte + row * dim * (dtype.primitive_bitwidth // 8)
    mine = _row_of(buffers, rank, place, dtype, block, is_aligned)
    tl.store(mine, tl.load(partial + row * dim + column, mask=inside, other=0.0), mask=inside)
    if not _meet(signals, epochs, row, rank, tl.load(polls), world, world_block):
        tl.store(missed, 1)
    if uses_switch:
        total = _switch_sum(tl.load(multicast) + place, dim, dtype, block)
    else:
        total = tl.zeros((block,), dtype=tl.float32)
        for peer in tl.static_range(world):
            theirs = _row_of(buffers, peer, place, dtype, block, is_aligned)
            total += tl.load(theirs, mask=inside, other=0.0).to(tl.float32)
    added = total.to(dtype)
    if has_bias:
        added = plus_bias(added, bias + column, inside)
    x = tl.load(hidden_states + row * dim + column, mask=inside, other=0.0)
    x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    tl.store(hidden_states + row * dim + column, x, mask=inside)
    norm_weight = tl.load(weight + column, mask=inside, other=0.0)
    store_norm(out + row * dim + column, x, norm_weight, inside, dim, eps)


def sum_add_norm(
    memory: PeerMemory,
    turn: int,
    hidden_states: torch.Tensor,
    partial: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """hidden_states [T, dim] += the sum of all ranks' `partial` [T, dim] + bias [dim], in place; then RMSNorm, a new tensor.

    Every rank calls it with the same T, at most `memory.max_rows`. turn: which buffer to use, 0 and 1 alternately: behind the
    barrier of one turn, no rank still reads the other turn's buffer. Where a peer does not arrive within `memory.polls`,
    `memory.missed` is set and the result is undefined.
    """
    count, dim = hidden_states.shape
    out = torch.empty_like(hidden_states)
    world = memory.world_size
    _sum_add_norm[(count,)](
        hidden_states,
        partial,
        weight if bias is None else bias,
        weight,
        out,
        memory.buffers,
        memory.signals,
        memory.multicast,
        memory.epochs,
        memory.polls,
        memory.missed,
        memory.rank,
        turn * memory.turn_bytes,
        dim,
        eps,
        uses_switch=memory.has_multicast,
        has_bias=bias is not None,
        is_aligned=dim * partial.itemsize % 16 == 0,
        world=world,
        world_block=triton.next_power_of_2(world),
        block=triton.next_power_of_2(dim),
        num_warps=norm_warps(dim),
    )
    return out
