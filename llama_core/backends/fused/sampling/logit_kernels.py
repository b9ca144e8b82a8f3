"""The rules of `logit_rules.py` in Triton: masks and lists of allowed tokens, biases, bans and penalties.

One kernel copies the logits that masks and lists allow, in one pass over the vocabulary. Another, with one program a row, edits
the few logits that are named: it takes time by the number of biases and of tokens before the position, not by the vocabulary.
Uses of tokens are counted again in each step, from the slot's tokens, so that rejected drafts leave nothing behind.

Also the log-probabilities of the sampled and of the most likely tokens: of raw logits, with sums in an order that the
vocabulary's size alone decides.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Final

import torch
import triton
import triton.language as tl

from llama_core.backends.fused.sampling.sampler import SamplingState
from llama_core.backends.fused.sampling.sampling_kernels import SamplingBuffers, index_of_key, ordered_key, value_of_key
from llama_core.backends.fused.step_memory import CHUNK, TOP_BLOCK, num_chunks
from llama_core.backends.fused.step_plan import SampleTensors
from llama_core.backends.logit_rules import FIRST_ALLOWED, FIRST_BAD_WORD, FIRST_ENTRY, WORD_WIDTH
from llama_core.scheduling.sampling_params import MAX_TOP_LOGPROBS

_TILE: Final = 1024  # entries, or tokens of a sequence, that are edited at a time
_WORDS: Final = 16  # bad words that are compared at a time
_CHUNK = tl.constexpr(CHUNK)
_TOP_BLOCK = tl.constexpr(TOP_BLOCK)
_FIRST_ENTRY = tl.constexpr(FIRST_ENTRY)
_FIRST_BAD_WORD = tl.constexpr(FIRST_BAD_WORD)
_FIRST_ALLOWED = tl.constexpr(FIRST_ALLOWED)
_WIDTH = tl.constexpr(WORD_WIDTH)
_NUM_TOP = tl.constexpr(MAX_TOP_LOGPROBS)
_NO_KEY = tl.constexpr(-(2**63))
_IN_PROMPT = tl.constexpr(-(2**31))  # beside the number of uses of a token


@triton.jit
def _is_set(bits, token, inside):
    """Whether the bit of each token is set in int64 words."""
    word = tl.load(bits + token // 64, mask=inside, other=0)
    return ((word >> (token % 64).to(tl.int64)) & 1) > 0


@triton.jit
def _copy_allowed(logits, edited, uses, tables, mask_indices, masks, slots, table_stride, mask_words, vocab):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * _CHUNK + tl.arange(0, _CHUNK)
    inside = token < vocab
    table = tables + tl.load(slots + row) * table_stride
    x = tl.load(logits + row * vocab + token, mask=inside, other=0.0)
    if mask_indices is not None:
        index = tl.load(mask_indices + row)
        if index >= 0:
            x = tl.where(_is_set(masks + index * mask_words, token, inside), x, float("-inf"))
    if (tl.load(table + 2) >> 32) > 0:
        x = tl.where(_is_set(table + _FIRST_ALLOWED, token, inside), x, float("-inf"))
    tl.store(edited + row * vocab + token, x, mask=inside)
    tl.store(uses + row * vocab + token, tl.zeros([_CHUNK], tl.int32), mask=inside)


@triton.jit
def _add_entries(edited, table, position, tile: tl.constexpr):
    sizes = tl.load(table + 1)
    num_entries, num_delayed = (sizes & 0xFFFFFFFF).to(tl.int32), (sizes >> 32).to(tl.int32)
    is_early = position < (tl.load(table) >> 32)
    for first in range(0, num_entries, tile):
        index = first + tl.arange(0, tile)
        inside = index < num_entries
        entry = tl.load(table + _FIRST_ENTRY + index, mask=inside, other=0)
        token = (entry & 0xFFFFFFFF).to(tl.int32)
        added = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        added = tl.where(is_early & (index < num_delayed), float("-inf"), added)
        x = tl.load(edited + token, mask=inside, other=0.0)
        tl.store(edited + token, x + added, mask=inside)


@triton.jit
def _penalize(edited, uses, tokens, prompt_length, position, presence, frequency, repetition, tile: tl.constexpr):
    begin = tl.where(repetition == 1.0, prompt_length, 0)
    for first in range(begin, position, tile):
        index = first + tl.arange(0, tile)
        token = tl.load(tokens + index, mask=index < position, other=0)
        tl.atomic_or(uses + token, _IN_PROMPT, mask=index < prompt_length, sem="relaxed")
        tl.atomic_add(uses + token, 1, mask=(index >= prompt_length) & (index < position), sem="relaxed")
    tl.debug_barrier()
    for first in range(begin, position, tile):
        index = first + tl.arange(0, tile)
        token = tl.load(tokens + index, mask=index < position, other=0)
        # One of several equal tokens gets the number of them.
        used = tl.atomic_xchg(uses + token, tl.zeros([tile], tl.int32), mask=index < position, sem="relaxed")
        is_used = (index < position) & (used != 0)
        x = tl.load(edited + token, mask=is_used, other=0.0)
        x = tl.where(repetition == 1.0, x, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition))
        count = (used & 0x7FFFFFFF).to(tl.float32)
        x = tl.where(count > 0, x - frequency * count - presence, x)
        tl.store(edited + token, x, mask=is_used)


@triton.jit
def _ban_words(edited, table, tokens, prompt_length, position, words: tl.constexpr):
    num_words = (tl.load(table + 2) & 0xFFFFFFFF).to(tl.int32)
    bad_words = (table + _FIRST_BAD_WORD).to(tl.pointer_type(tl.int32))
    column = tl.arange(0, _WIDTH)
    before = position - (_WIDTH - 1) + column
    is_before = (before >= prompt_length) & (before < position)
    known = tl.load(tokens + before, mask=is_before, other=-2)
    for first in range(0, num_words, words):
        index = first + tl.arange(0, words)
        place = index[:, None] * _WIDTH + column[None, :]
        word = tl.load(bad_words + place, mask=(index < num_words)[:, None], other=-1)
        is_last = (column == _WIDTH - 1)[None, :]
        follows = is_last | (word < 0) | (word == known[None, :])
        token = tl.max(tl.where(is_last, word, -1), axis=1)
        is_banned = (tl.min(follows.to(tl.int32), axis=1) > 0) & (index < num_words)
        tl.store(edited + token, tl.full([words], float("-inf"), tl.float32), mask=is_banned)


@triton.jit
def _apply_rules(
    edited, uses, tables, tokens, places, penalties, strides, vocab, tile: tl.constexpr, words: tl.constexpr
):
    """places: slots and positions of the samples. penalties: presence, frequency and repetition of each slot. strides: of
    tables, tokens and penalties. Bans come last, because no bias or penalty changes -inf."""
    slots, positions = places
    presences, frequencies, repetitions = penalties
    table_stride, token_stride, stride = strides
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    table, known = tables + slot * table_stride, tokens + slot * token_stride
    prompt_length = tl.load(table) & 0xFFFFFFFF
    edited += row * vocab
    _add_entries(edited, table, position, tile)
    presence, frequency = tl.load(presences + slot * stride), tl.load(frequencies + slot * stride)
    repetition = tl.load(repetitions + slot * stride)
    tl.debug_barrier()
    if (presence != 0.0) | (frequency != 0.0) | (repetition != 1.0):
        _penalize(edited, uses + row * vocab, known, prompt_length, position, presence, frequency, repetition, tile)
    tl.debug_barrier()
    _ban_words(edited, table, known, prompt_length, position, words)


def edit(
    logits: torch.Tensor, state: SamplingState, samples: SampleTensors, buffers: SamplingBuffers, *, has_masks: bool
) -> None:
    """Write logits float32 [B, vocab] with the rules of their slots to `buffers.probs`. has_masks: some have grammars."""
    (count, vocab), tables, masks, sampling = logits.shape, state.rules, state.masks, state.sampling
    written, indices = (buffers.probs, buffers.listed), state.mask_indices if has_masks else None
    strides = tables.stride(0), masks.stride(0)
    _copy_allowed[(count, buffers.chunks)](
        logits, *written, tables, indices, masks, samples.slots, *strides, vocab, num_warps=8
    )
    places = samples.slots, samples.positions
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    of_slots = tables.stride(0), state.tokens.stride(0), sampling.temperature.stride(0)
    # Products and sums are rounded apart, as the other backends round them.
    options = {"tile": _TILE, "words": _WORDS, "num_warps": 8, "enable_fp_fusion": False}
    _apply_rules[(count,)](*written, tables, state.tokens, places, penalties, of_slots, vocab, **options)


@triton.jit
def _top_keys(keys):
    """The greatest _NUM_TOP of `keys`, which differ, in descending order; then _NO_KEY."""
    place = tl.arange(0, _TOP_BLOCK)
    found = tl.full([_TOP_BLOCK], _NO_KEY, tl.int64)
    latest = tl.max(keys, axis=0)
    for i in range(_NUM_TOP):
        found = tl.where(place == i, latest, found)
        latest = tl.max(tl.where(keys < latest, keys, _NO_KEY), axis=0)
    return found


@triton.jit
def _chunk_logprobs(logits, sums, tops, vocab):
    """Of one chunk: the sum of e^(x - its greatest logit), and its greatest keys."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * _CHUNK + tl.arange(0, _CHUNK)
    inside = token < vocab
    x = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf"))
    at = row * tl.num_programs(1) + chunk
    keys = _top_keys(tl.where(inside, ordered_key(x, token), _NO_KEY))
    tl.store(tops + at * _TOP_BLOCK + tl.arange(0, _TOP_BLOCK), keys)
    tl.store(sums + at, tl.sum(tl.exp(x - value_of_key(tl.max(keys, axis=0))), axis=0))


@triton.jit
def _combine_logprobs(logits, sums, tops, tokens, out, vocab, chunks, columns, chunk_block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk, place = tl.arange(0, chunk_block), tl.arange(0, _TOP_BLOCK)
    inside = chunk < chunks
    at = (row * chunks + chunk[:, None]) * _TOP_BLOCK + place[None, :]
    keys = tl.load(tops + at, mask=inside[:, None], other=_NO_KEY)
    found = _top_keys(tl.reshape(keys, [chunk_block * _TOP_BLOCK]))
    highest = value_of_key(tl.max(found, axis=0))
    of_chunk = value_of_key(tl.max(keys, axis=1))
    total = tl.load(sums + row * chunks + chunk, mask=inside, other=0.0)
    total = tl.sum(tl.where(inside, total * tl.exp(of_chunk - highest), 0.0), axis=0)
    log_total = tl.log(total)
    token = tl.maximum(tl.load(tokens + row), 0)
    chosen = tl.load(logits + row * vocab + token) - highest - log_total
    tl.store(out + row * columns, _pair(chosen, token))
    values = value_of_key(found) - highest - log_total
    tl.store(out + row * columns + 1 + place, _pair(values, index_of_key(found)), mask=place < columns - 1)


@triton.jit
def _pair(value, token):
    return (value.to(tl.int32, bitcast=True).to(tl.int64) << 32) | token


class LogprobBuffers:
    """For up to `max_rows` rows: sums float32 [rows, chunks], tops int64 [rows, chunks, TOP_BLOCK]."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        chunks = num_chunks(vocab)
        self.sums = torch.zeros((max_rows, chunks), dtype=torch.float32, device=device)
        self.tops = torch.zeros((max_rows, chunks, TOP_BLOCK), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        return self.sums.nbytes + self.tops.nbytes


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, buffers: LogprobBuffers) -> torch.Tensor:
    """int64 [B, 1 + n] of logits float32 [B, vocab]: of the token of each row, int64 [B], and of the n most likely, n =
    min(MAX_TOP_LOGPROBS, vocab): the bits of the natural log of the softmax, float32, above the token."""
    count, vocab = logits.shape
    chunks = buffers.sums.shape[1]
    columns = 1 + min(MAX_TOP_LOGPROBS, vocab)
    out = torch.empty((count, columns), dtype=torch.int64, device=logits.device)
    _chunk_logprobs[(count, chunks)](logits, buffers.sums, buffers.tops, vocab, num_warps=8)
    options = {"chunk_block": triton.next_power_of_2(chunks), "num_warps": 4}
    _combine_logprobs[(count,)](logits, buffers.sums, buffers.tops, tokens, out, vocab, chunks, columns, **options)
    return out
