"""The sum of all ranks' parts of a product, added to the hidden states and normed, in one kernel without NCCL.

Every rank writes its part to a buffer that its peers can read (`peer_memory.py`), tells them, waits for theirs, and reads all
parts itself: a one-shot all-reduce. Parts are added in float32 in the order of the ranks, so all ranks have the same bits,
whatever the number of rows.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl

from llama_core.execution.fused.kernel_functions import plus_bias, store_norm
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
    """Wait until this row's program runs on every rank. What they wrote before can be read afterwards. Returns whether they
    came within `polls` polls.

    A rank counts its meetings of a row in `epochs`; signals only grow, so none is reset, and one that comes early is kept.
    """
    peer = tl.arange(0, world_block)
    is_peer = peer < world
    epoch = tl.load(epochs + row) + 1
    # All threads' writes come before the signal of one of them.
    tl.debug_barrier()
    theirs = tl.load(signals + peer, mask=is_peer, other=0) + (row * world + rank) * 8
    tl.atomic_xchg(theirs.to(tl.pointer_type(tl.int64)), epoch, mask=is_peer, sem="release", scope="sys")
    own = (tl.load(signals + rank) + row * world * 8).to(tl.pointer_type(tl.int64)) + peer
    seen = tl.atomic_add(own, 0, mask=is_peer, sem="acquire", scope="sys")
    while (tl.min(tl.where(is_peer, seen, epoch), axis=0) < epoch) & (polls > 0):
        seen = tl.atomic_add(own, 0, mask=is_peer, sem="acquire", scope="sys")
        polls -= 1
    # The wait of one thread is over; that of the others ends here.
    tl.debug_barrier()
    tl.store(epochs + row, epoch)
    return tl.min(tl.where(is_peer, seen, epoch), axis=0) >= epoch


@triton.jit
def _sum_add_norm(
    hidden_states,
    partial,
    bias,
    weight,
    out,
    buffers,
    signals,
    epochs,
    polls,
    missed,
    rank,
    first_byte,
    dim,
    eps,
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
    store_norm(out + row * dim + column, x, weight + column, inside, dim, eps)


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

    Every rank calls it with the same T, at most `memory.max_rows`. turn: 0 and 1 alternately; when the second meets, no rank
    reads what the first one wrote any more. Where a peer does not come within `memory.polls`, `memory.missed` is set and the
    result is undefined.
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
        memory.epochs,
        memory.polls,
        memory.missed,
        memory.rank,
        turn * memory.turn_bytes,
        dim,
        eps,
        has_bias=bias is not None,
        is_aligned=dim * partial.itemsize % 16 == 0,
        world=world,
        world_block=triton.next_power_of_2(world),
        block=triton.next_power_of_2(dim),
    )
    return out
