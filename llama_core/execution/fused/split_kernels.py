"""The splits of a decode's context in Triton: the positions of each, and the weighted sum of their results.

A split's result has the binary log of its sum beside it, so that results with different common factors can be added (flash
decoding, Dao et al. 2023).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Final

import torch
import triton
import triton.language as tl

from llama_core.execution.fused.attention_launches import MIN_DOT
from llama_core.execution.fused.kernel_functions import early_launch, let_next_start, wait_for_previous
from llama_core.execution.fused.step_memory import SPLIT_BITS, SPLIT_UNIT
from llama_core.execution.fused.step_plan import TILE_COLUMNS

_COMBINED_AT_ONCE: Final = 8  # splits whose results are loaded before the first one is added


@triton.jit
def first_seen_of(length, window: tl.constexpr):
    """The first position that the last of `length` positions attends to."""
    if window:
        return tl.maximum(length - window, 0)
    return length * 0


@triton.jit
def split_of(position, split_unit: tl.constexpr, split_bits: tl.constexpr):
    """See `step_memory.split_of`. The exponent is read from a float32, which represents integers below 2^24 exactly."""
    units = position // split_unit
    exponent = (units.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127 - split_bits
    exponent = tl.maximum(exponent, 0)
    return (exponent << split_bits) + (units >> exponent)


@triton.jit
def split_begin(split, split_unit: tl.constexpr, split_bits: tl.constexpr):
    """See `step_memory.split_begin`."""
    exponent = tl.maximum((split >> split_bits) - 1, 0)
    return ((split - (exponent << split_bits)) << exponent) * split_unit


@triton.jit
def combine_weights(best, log_sum):
    """The factors of the splits combined so far and of a further split, and the binary log of their new common factor."""
    highest = tl.maximum(best, log_sum)
    return tl.exp2(best - highest), tl.exp2(log_sum - highest), highest


@triton.jit
def weighted_sum(mixed, kept, part, weight):
    """mixed * kept + part * weight: a split's result is added to those combined so far."""
    # An explicit FMA: without it, the compiler chooses which product it rounds, and may choose differently in each kernel.
    return tl.fma(mixed, kept, part * weight)


@triton.jit(do_not_specialize=["n_splits", "n_heads"])
def _combine_splits(
    partial,
    log_sums,
    tiles,
    out,
    n_splits,
    n_heads,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    window: tl.constexpr,
    split_unit: tl.constexpr,
    split_bits: tl.constexpr,
    tile_columns: tl.constexpr,
    at_once: tl.constexpr,
    is_early: tl.constexpr,
):
    """The result of a tile's tokens for one head. The arguments are those of `_attend` with is_split."""
    about, head = tiles + tl.program_id(0) * tile_columns, tl.program_id(1)
    dim = tl.arange(0, dim_block)
    in_dim = dim < head_dim
    first_token, count = tl.load(about), tl.load(about + 1)
    first, decode_token = tl.load(about + 3), tl.load(about + 4)
    wait_for_previous(is_early)
    let_next_start(is_early)
    for index in range(0, count):
        length = first + index + 1
        parts = ((decode_token + index) * n_heads + head) * n_splits
        mixed = tl.zeros([dim_block], tl.float32)
        total = 0.0
        best = float("-inf")
        begin = split_of(first_seen_of(length, window), split_unit, split_bits)
        end = split_of(length - 1, split_unit, split_bits) + 1
        # Unrolled, so that several splits are loaded at once. Splits behind the end have a weight of 0, which changes no bit.
        for several in range(begin, end, at_once):
            for ahead in tl.static_range(at_once):
                split = several + ahead
                at = parts + split % n_splits
                log_sum = tl.load(log_sums + at, mask=split < end, other=float("-inf"))
                part = tl.load(partial + at * head_dim + dim, mask=in_dim & (split < end), other=0.0)
                kept, weight, best = combine_weights(best, log_sum)
                mixed = weighted_sum(mixed, kept, part, weight)
                total = weighted_sum(total, kept, weight, 1.0)
        place = out + ((first_token + index) * n_heads + head) * head_dim + dim
        tl.store(place, (mixed / total).to(out.dtype.element_ty), mask=in_dim)


def combine_splits(
    partial: torch.Tensor, log_sums: torch.Tensor, tiles: torch.Tensor, out: torch.Tensor, window: int
) -> None:
    """Write the results of all decode tokens to `out` [T, H, head_dim], from those that `_attend` has written for each split:
    partial float32 [decode tokens, H, splits, head_dim], log_sums [decode tokens, H, splits]."""
    n_heads, num_splits, head_dim = partial.shape[1:]
    _combine_splits[(len(tiles), n_heads)](
        partial,
        log_sums,
        tiles,
        out,
        num_splits,
        n_heads,
        head_dim=head_dim,
        dim_block=max(MIN_DOT, triton.next_power_of_2(head_dim)),
        window=window,
        split_unit=SPLIT_UNIT,
        split_bits=SPLIT_BITS,
        tile_columns=TILE_COLUMNS,
        at_once=_COMBINED_AT_ONCE,
        num_warps=1,
        **early_launch(),
    )
