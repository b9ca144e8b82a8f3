"""Sampling in Triton without a sort, as `sampling.py` defines it, with integer sums, which do not depend on their order.

The probability of a token, relative to the most likely one, is a multiple of 2^-43; less likely tokens are not sampled. Sums
are therefore exact in any order, so that a row's token depends neither on its neighbours nor on the number of programs. Sums in
floating point, as the other backends have them, may differ from these in the last bits, and then give another token where the
random number falls between the two.

Several programs share a row in the two kernels that read all logits, because one multiprocessor would take 128,256 atomic
additions one after the other; adding integers atomically gives the same sums always. The third kernel has one program for each
row (`nucleus_kernels.py`), which reads the row once or twice more without atomic operations: an estimated 5 to 10 us for
128,256 logits each. Several programs would take as long for a few rows, because each read would be a launch of its own.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Final

import torch
import triton
import triton.language as tl

from llama_core.backends.backend import NOT_FINITE, NOTHING_ALLOWED
from llama_core.backends.fused.sampling.nucleus_kernels import bin_of, one_token, sample_of_row, shift_of
from llama_core.backends.fused.sampling.sampler import Mode
from llama_core.backends.fused.step_memory import BINS, CHUNK, num_chunks, num_replicas
from llama_core.backends.fused.step_plan import SampleTensors
from llama_core.backends.sampling import GREEDY_BELOW
from llama_core.backends.sampling_tensors import SamplingTensors

MAX_VOCAB: Final = 2**19  # with more tokens of the greatest probability, the sums would overflow
_TILE: Final = 8192  # logits that the third kernel reads at a time
_CHUNK = tl.constexpr(CHUNK)
_BINS = tl.constexpr(BINS)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_NOTHING_ALLOWED = tl.constexpr(NOTHING_ALLOWED)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_BAD = tl.constexpr(2**63 - 1)  # the key of a chunk with a logit that is not finite
_NO_KEY = tl.constexpr(-(2**63))
_LEAST = tl.constexpr(2.0**-43)


@triton.jit
def ordered_key(x, index):
    """int64: greater for greater x, then for smaller indices."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def value_of_key(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def index_of_key(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _exp(x):
    """e^x for x <= 0, as `simd.hpp` computes it; from -87 on."""
    inside = tl.maximum(x, -87.0)
    shifted = tl.fma(inside, 1.44269504, 12582912.0)
    n = shifted - 12582912.0
    r = tl.fma(n, -0.693359375, inside)
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.fma(r, 1.0 / 5040, 1.0 / 720)
    p = tl.fma(p, r, 1.0 / 120)
    p = tl.fma(p, r, 1.0 / 24)
    p = tl.fma(p, r, 1.0 / 6)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(p, r, 1.0)
    p = tl.fma(p, r, 1.0)
    bits = p.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)
    return tl.minimum(bits.to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _highest(parts, row, chunks, chunk_block: tl.constexpr):
    chunk = tl.arange(0, chunk_block)
    return tl.max(tl.load(parts + row * chunks + chunk, mask=chunk < chunks, other=_NO_KEY), axis=0)


@triton.jit
def _is_sampled(highest, temperature):
    """If the division leaves float's range, only the greatest logit has a probability above 0, as at temperature 0."""
    top = tl.div_rn(highest, tl.maximum(temperature, _GREEDY_BELOW))
    return (temperature >= _GREEDY_BELOW) & (tl.abs(top) < float("inf"))


@triton.jit
def _greatest(logits, edited, parts, bins, vocab, replicas):
    """Find the greatest logit of one chunk and its first token. edited: the logits after rules, None where there are none.
    Clears the bins for `_spread`."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * _CHUNK + tl.arange(0, _CHUNK)
    inside = token < vocab
    x = tl.load(logits + row * vocab + token, mask=inside, other=0.0)
    num_bad = tl.sum((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, axis=0)
    if edited is not None:
        x = tl.load(edited + row * vocab + token, mask=inside, other=0.0)
    key = tl.max(tl.where(inside, ordered_key(x, token), _NO_KEY), axis=0)
    tl.store(parts + row * tl.num_programs(1) + chunk, tl.where(num_bad > 0, _BAD, key))
    if chunk < replicas:
        bin = tl.arange(0, _BINS)
        tl.store(bins + (row * replicas + chunk) * _BINS + bin, tl.zeros([_BINS], tl.int64))


@triton.jit
def _spread(
    logits, probs, parts, bins, slots, temperatures, min_ps, stride, vocab, replicas, chunk_block: tl.constexpr
):
    """Write probabilities relative to the greatest, 0 where a token cannot be sampled, and add up each bin's count and mass."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = _highest(parts, row, tl.num_programs(1), chunk_block)
    highest, slot = value_of_key(key), tl.load(slots + row)
    temperature = tl.load(temperatures + slot * stride)
    if (key != _BAD) & _is_sampled(highest, temperature):
        token = chunk * _CHUNK + tl.arange(0, _CHUNK)
        inside = token < vocab
        x = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf"))
        p = _exp(tl.div_rn(x, temperature) - tl.div_rn(highest, temperature))
        is_kept = inside & (p >= _LEAST) & (p >= tl.load(min_ps + slot * stride))
        p = tl.where(is_kept, p, 0.0)
        tl.store(probs + row * vocab + token, p, mask=inside)
        bits = p.to(tl.int32, bitcast=True)
        place = (row * replicas + chunk % replicas) * _BINS + bin_of(bits)
        tl.atomic_add(bins + place, one_token(bits, shift_of(bits)), mask=is_kept, sem="relaxed")


@triton.jit
def _pick(
    buffers, out, places, fields, strides, sizes, is_greedy: tl.constexpr, chunk_block: tl.constexpr, tile: tl.constexpr
):
    """places: slots and positions of the samples. fields: temperature, top_p, top_k and seed of each slot. strides: of the
    floats and of the integers among them."""
    slots, positions = places
    float_stride, int_stride = strides
    vocab, chunks, replicas = sizes
    probs, listed, parts, bins = buffers
    temperatures, top_ps, top_ks, seeds = fields
    row = tl.program_id(0).to(tl.int64)
    key = _highest(parts, row, chunks, chunk_block)
    highest = value_of_key(key)
    chosen = index_of_key(key)
    if not is_greedy:
        slot = tl.load(slots + row)
        if (key != _BAD) & _is_sampled(highest, tl.load(temperatures + slot * float_stride)):
            chosen = sample_of_row(
                probs + row * vocab,
                listed + row * vocab,
                bins + row * replicas * _BINS,
                vocab,
                replicas,
                tl.load(top_ks + slot * int_stride),
                tl.load(top_ps + slot * float_stride),
                tl.load(seeds + slot * int_stride),
                tl.load(positions + row),
                tile,
            ).to(tl.int64)
    chosen = tl.where(highest == float("-inf"), _NOTHING_ALLOWED, chosen)
    tl.store(out + row, tl.where(key == _BAD, _NOT_FINITE, chosen))


class SamplingBuffers:
    """Buffers through which the sampling kernels of one step pass results on, for up to `max_rows` rows of `vocab` logits.

    probs: float32 [rows, vocab]; edited logits lie there before. listed: int32 [rows, vocab] tokens; the numbers of their uses
    lie there before.
    """

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.chunks, self.replicas = num_chunks(vocab), num_replicas(vocab)
        self.probs = torch.zeros((max_rows, vocab), dtype=torch.float32, device=device)
        self.listed = torch.zeros((max_rows, vocab), dtype=torch.int32, device=device)
        self.parts = torch.zeros((max_rows, self.chunks), dtype=torch.int64, device=device)
        self.bins = torch.zeros((max_rows, self.replicas, BINS), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        return self.probs.nbytes + self.listed.nbytes + self.parts.nbytes + self.bins.nbytes


def sample(
    logits: torch.Tensor, sampling: SamplingTensors, samples: SampleTensors, buffers: SamplingBuffers, mode: Mode
) -> torch.Tensor:
    """Sample a token for each row of logits, float32 [B, vocab]: int64 [B], NOT_FINITE or NOTHING_ALLOWED where there is none.

    sampling: of all slots. Where the mode has rules, `buffers.probs` holds the logits after them, which may be -inf.
    """
    count, vocab = logits.shape
    chunks, replicas, probs, parts = buffers.chunks, buffers.replicas, buffers.probs, buffers.parts
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    is_greedy, grid = mode == "greedy", (count, chunks)
    edited = probs if mode in ("ruled", "masked") else None
    tile, chunk_block = min(_TILE, triton.next_power_of_2(vocab)), triton.next_power_of_2(chunks)
    _greatest[grid](logits, edited, parts, buffers.bins, vocab, 0 if is_greedy else replicas, num_warps=8)
    strides = sampling.temperature.stride(0), sampling.seed.stride(0)
    if not is_greedy:
        read, passed = logits if edited is None else edited, (probs, parts, buffers.bins)
        limits = sampling.temperature, sampling.min_p, strides[0]
        _spread[grid](read, *passed, samples.slots, *limits, vocab, replicas, chunk_block=chunk_block, num_warps=8)
    fields = sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed
    options = {"is_greedy": is_greedy, "chunk_block": chunk_block, "tile": tile}
    options["num_warps"] = 1 if is_greedy else max(4, tile // 512)
    found, places = (probs, buffers.listed, parts, buffers.bins), (samples.slots, samples.positions)
    _pick[(count,)](found, out, places, fields, strides, (vocab, chunks, replicas), **options)
    return out
