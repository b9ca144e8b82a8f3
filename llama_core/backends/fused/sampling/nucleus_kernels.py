"""Samples one row's token in Triton, without a sort: the token at which the sum over the nucleus passes a random number.

A row's probabilities, relative to the greatest, are multiples of 2^-43 in bins, 32 for each power of two. `_find` finds the bin
in which a sum reaches its limit, lists the bin's tokens, and bisects them. Each limit in use (top_k, top_p, the random number)
takes one read of the row. The list is short, except for flat distributions.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl

from llama_core.backends.fused.step_memory import BINS

UNIT = tl.constexpr(43)  # masses are multiples of 2^-43
_BIN_BITS = tl.constexpr(18)  # low bits of a float32, in which the members of a bin differ
_FIRST_BIT = tl.constexpr(1 << 17)
_BIN_OF_ONE = tl.constexpr(0x3F800000 >> 18)
_COUNT = tl.constexpr(43)  # the lowest bit of the number of tokens in `packed`, above their mass
_ONE_TOKEN = tl.constexpr(1 << 43)
_IN_MASS = tl.constexpr((1 << 43) - 1)
_BINS = tl.constexpr(BINS)
_LIST_TILE = tl.constexpr(1024)  # listed tokens that are read at a time


@triton.jit
def one_token(bits, shift):
    """One token, packed: count 1, and its mass in the bin's unit. bits: of its float32 probability. shift: the bin's."""
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    return (mantissa >> tl.maximum(-shift, 0).to(tl.int64)) | _ONE_TOKEN


@triton.jit
def _mass_of(packed, shift):
    return (packed & _IN_MASS) << tl.maximum(shift, 0).to(tl.int64)


@triton.jit
def bin_of(bits):
    """The bin of a probability's float32 bits; 0 for the greatest probability. A probability of 0 is beyond all bins."""
    return -(bits >> _BIN_BITS) + _BIN_OF_ONE


@triton.jit
def _least_bits(bin):
    return (-bin + _BIN_OF_ONE) << _BIN_BITS


@triton.jit
def shift_of(bits):
    """The left shift that makes a mantissa of 24 bits a multiple of 2^-43: then probability 1 is 2^43. Negative: to the
    right."""
    return (bits >> 23) - 127 + (UNIT - 23)


@triton.jit
def _list_bin(probs, listed, vocab, bin, tile: tl.constexpr):
    """Write the tokens of a bin to `listed`, in the order of their ids. Returns their number."""
    count = vocab * 0
    tl.debug_barrier()  # all threads have read the previous list
    for first in range(0, vocab, tile):
        token = first + tl.arange(0, tile)
        bits = tl.load(probs + token, mask=token < vocab, other=0.0).to(tl.int32, bitcast=True)
        is_in = (bin_of(bits) == bin).to(tl.int32)
        number = tl.sum(is_in, axis=0)
        if number > 0:
            tl.store(listed + count + tl.cumsum(is_in, axis=0) - 1, token, mask=is_in > 0)
        count += number
    tl.debug_barrier()
    return count


@triton.jit
def _listed_bits(probs, listed, first, count):
    """Ids of the listed tokens first .. first + _LIST_TILE, and the bits of their probabilities; 0 after the list's end."""
    index = first + tl.arange(0, _LIST_TILE)
    token = tl.load(listed + index, mask=index < count, other=0)
    return token, tl.load(probs + token, mask=index < count, other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def _sum_from(probs, listed, count, bits, threshold, shift):
    """The packed sum over the listed tokens whose bits are at least `threshold`. bits: of the first `_LIST_TILE` tokens."""
    total = tl.sum(tl.where(bits >= threshold, one_token(bits, shift), 0), axis=0)
    for first in range(_LIST_TILE, count, _LIST_TILE):
        _, further = _listed_bits(probs, listed, first, count)
        total += tl.sum(tl.where(further >= threshold, one_token(further, shift), 0), axis=0)
    return total


@triton.jit
def _find(probs, listed, vocab, counts, masses, target, by_count: tl.constexpr, tile: tl.constexpr):
    """Find the token at which the count or the mass of the most likely tokens first exceeds `target`.

    counts, masses: int64 [bins], of each bin and those before it. Returns the bits of the token's probability, its mass, the
    count and mass of more likely tokens, and the length of the list, which has all tokens of equal bits.
    """
    reached = counts if by_count else masses
    bin = tl.sum((reached <= target).to(tl.int32), axis=0)
    is_before = reached <= target
    count = tl.max(tl.where(is_before, counts, 0), axis=0)
    mass = tl.max(tl.where(is_before, masses, 0), axis=0)
    length = _list_bin(probs, listed, vocab, bin, tile)
    threshold = _least_bits(bin)
    shift = shift_of(threshold)
    _, bits = _listed_bits(probs, listed, 0, length)
    bit = threshold * 0 + _FIRST_BIT
    for _ in range(_BIN_BITS):
        candidate = threshold | bit
        packed = _sum_from(probs, listed, length, bits, candidate, shift)
        further = count + (packed >> _COUNT) if by_count else mass + _mass_of(packed, shift)
        threshold = tl.where(further > target, candidate, threshold)
        bit = bit >> 1
    packed = _sum_from(probs, listed, length, bits, threshold + 1, shift)
    count += packed >> _COUNT
    mass += _mass_of(packed, shift)
    return threshold, _mass_of(one_token(threshold, shift), shift), count, mass, length


@triton.jit
def _mixed(z):
    """splitmix64's finaliser, as in `sampling.py`."""
    z += 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _nucleus(probs, listed, vocab, counts, masses, top_k, top_p, tile: tl.constexpr):
    """The nucleus's mass. A token of the top_k most likely belongs to the nucleus if the tokens before it have at most top_p of
    the mass of these top_k."""
    total = tl.max(masses, axis=0)
    if (top_k > 0) & (top_k < tl.max(counts, axis=0)):
        _, one, count, mass, _ = _find(probs, listed, vocab, counts, masses, top_k - 1, True, tile)
        total = mass + (top_k - count) * one
    if top_p < 1.0:
        limit = (top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        _, one, _, mass, _ = _find(probs, listed, vocab, counts, masses, limit, False, tile)
        total = mass + ((limit - mass) // one + 1) * one
    return total


@triton.jit
def sample_of_row(probs, listed, bins, vocab, replicas, top_k, top_p, seed, position, tile: tl.constexpr):
    """The token that a row samples. bins: int64 [replicas, BINS], `packed` sums. listed: room for `vocab` tokens."""
    bin = tl.arange(0, _BINS)
    packed = tl.zeros([_BINS], tl.int64)
    for replica in range(0, replicas):
        packed += tl.load(bins + replica * _BINS + bin)
    counts = tl.cumsum(packed >> _COUNT, axis=0)
    masses = tl.cumsum(_mass_of(packed, shift_of(_least_bits(bin))), axis=0)
    nucleus = _nucleus(probs, listed, vocab, counts, masses, top_k, top_p, tile)
    number = _mixed(_mixed(seed.to(tl.uint64, bitcast=True)) + position.to(tl.uint64, bitcast=True))
    # The first 53 bits as a fraction, times the mass.
    fraction = (number >> 11) << 11
    target = tl.umulhi(fraction, nucleus.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    threshold, one, _, mass, length = _find(probs, listed, vocab, counts, masses, target, False, tile)
    wanted = ((target - mass) // one).to(tl.int32)
    found = length * 0
    seen = length * 0
    for first in range(0, length, _LIST_TILE):
        token, bits = _listed_bits(probs, listed, first, length)
        is_equal = (bits == threshold).to(tl.int32)
        rank = seen + tl.cumsum(is_equal, axis=0) - 1
        found += tl.sum(tl.where((is_equal > 0) & (rank == wanted), token, 0), axis=0)
        seen += tl.sum(is_equal, axis=0)
    return found
