"""Where the context of a decode is split: at positions that neither max_seq_len nor other sequences change.

64 splits of SPLIT_UNIT positions end at 8,192, 32 of twice as many at 16,384, and so on. A short context then has many
splits, and a long one few results of splits, which need memory.
"""

from typing import Final

SPLIT_UNIT: Final = 128  # a multiple of the positions that a program reads at a time
SPLIT_BITS: Final = 5  # binary logarithm of the splits of each size
# Aimed at where programs share a decode's splits: more would only shorten each program's loop.
PROGRAMS_PER_MULTIPROCESSOR: Final = 4
# With so many programs, an H100 or H200 is full.
_FULL_PROGRAMS: Final = PROGRAMS_PER_MULTIPROCESSOR * 132


def combines_in_kernel(num_decode_tokens: int, n_kv_heads: int) -> bool:
    """Whether the attention kernel combines the splits of decodes itself: it has enough programs with one for each decode token
    and key head. Independent of the GPU, because the memory plan uses it too."""
    return num_decode_tokens * n_kv_heads >= _FULL_PROGRAMS


def max_split_decode_tokens(n_kv_heads: int) -> int:
    """The largest number of decode tokens whose splits a kernel of its own combines."""
    return (_FULL_PROGRAMS - 1) // n_kv_heads


def split_of(position: int) -> int:
    """The split that has this position."""
    units = position // SPLIT_UNIT
    exponent = max(units.bit_length() - 1 - SPLIT_BITS, 0)
    return (exponent << SPLIT_BITS) + (units >> exponent)


def split_begin(split: int) -> int:
    """The first position of a split."""
    exponent = max((split >> SPLIT_BITS) - 1, 0)
    return ((split - (exponent << SPLIT_BITS)) << exponent) * SPLIT_UNIT


def split_count(num_positions: int, window: int) -> int:
    """Splits that one query sees at most, of so many positions. window: that it sees, 0 for all."""
    all_splits = split_of(num_positions - 1) + 1
    # As many as if all splits were as short as the first ones.
    return min(all_splits, (window + SPLIT_UNIT - 2) // SPLIT_UNIT + 1) if window else all_splits


def longest_split(num_positions: int) -> int:
    """Positions of the longest split of so many."""
    last = split_of(num_positions - 1)
    begin = split_begin(last)
    return max(num_positions - begin, begin - split_begin(last - 1) if last else 0)
