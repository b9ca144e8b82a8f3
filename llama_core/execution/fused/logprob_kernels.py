"""Log-probabilities of the sampled and of the most likely tokens in Triton: raw logits, sums in an order that the vocabulary's
size alone decides."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl

from llama_core.execution.fused.sampling_kernels import index_of_key, ordered_key, value_of_key
from llama_core.execution.fused.sampling_sizes import CHUNK, TOP_BLOCK, num_chunks
from llama_core.scheduling.sampling_params import MAX_TOP_LOGPROBS

_NUM_TOP = tl.constexpr(MAX_TOP_LOGPROBS)
_NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def _top_keys(keys, top_block: tl.constexpr):
    """The greatest _NUM_TOP of `keys`, which differ, in descending order; then _NO_KEY."""
    place = tl.arange(0, top_block)
    found = tl.full([top_block], _NO_KEY, tl.int64)
    latest = tl.max(keys, axis=0)
    for i in range(_NUM_TOP):
        found = tl.where(place == i, latest, found)
        latest = tl.max(tl.where(keys < latest, keys, _NO_KEY), axis=0)
    return found


@triton.jit
def _chunk_logprobs(logits, sums, tops, vocab, block: tl.constexpr, top_block: tl.constexpr):
    """Of one chunk: the sum of e^(x - its greatest logit), and its greatest keys."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = chunk * block + tl.arange(0, block)
    inside = token < vocab
    x = tl.load(logits + row * vocab + token, mask=inside, other=float("-inf"))
    at = row * tl.num_programs(1) + chunk
    keys = _top_keys(tl.where(inside, ordered_key(x, token), _NO_KEY), top_block)
    tl.store(tops + at * top_block + tl.arange(0, top_block), keys)
    tl.store(sums + at, tl.sum(tl.exp(x - value_of_key(tl.max(keys, axis=0))), axis=0))


@triton.jit
def _combine_logprobs(
    logits, sums, tops, tokens, out, vocab, chunks, columns, chunk_block: tl.constexpr, top_block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunk, place = tl.arange(0, chunk_block), tl.arange(0, top_block)
    inside = chunk < chunks
    at = (row * chunks + chunk[:, None]) * top_block + place[None, :]
    keys = tl.load(tops + at, mask=inside[:, None], other=_NO_KEY)
    found = _top_keys(tl.reshape(keys, [chunk_block * top_block]), top_block)
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
    _chunk_logprobs[(count, chunks)](
        logits, buffers.sums, buffers.tops, vocab, block=CHUNK, top_block=TOP_BLOCK, num_warps=8
    )
    _combine_logprobs[(count,)](
        logits,
        buffers.sums,
        buffers.tops,
        tokens,
        out,
        vocab,
        chunks,
        columns,
        chunk_block=triton.next_power_of_2(chunks),
        top_block=TOP_BLOCK,
        num_warps=4,
    )
    return out
