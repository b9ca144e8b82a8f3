"""The kernels at both ends of a step in Triton: what its tokens are and where they lie, and where its samples go.

Each does what would otherwise be several operations of torch, and so several small kernels, one after the other.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Final

import torch
import triton
import triton.language as tl

_COLUMNS: Final = 1024  # of an embedding that one program copies
_SAMPLES: Final = 128  # that one program stores


@triton.jit(do_not_specialize=["token_stride", "table_stride"])
def _embed(
    tokens,
    block_tables,
    slots,
    positions,
    embeddings,
    out,
    slot_mapping,
    token_stride,
    table_stride,
    columns,
    block_size: tl.constexpr,
    block: tl.constexpr,
):
    """Some columns of one token's embedding; the first program of each token also writes its physical position."""
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    token = tl.load(tokens + slot * token_stride + position)
    if tl.program_id(1) == 0:
        number = tl.load(block_tables + slot * table_stride + position // block_size)
        tl.store(slot_mapping + row, number * block_size + position % block_size)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < columns
    tl.store(
        out + row * columns + column,
        tl.load(embeddings + token * columns + column, mask=inside, other=0.0),
        mask=inside,
    )


@triton.jit(do_not_specialize=["token_stride", "count"])
def _store_samples(sampled, slots, positions, tokens, results, token_stride, count, block: tl.constexpr):
    index = tl.program_id(0) * block + tl.arange(0, block)
    inside = index < count
    sample = tl.load(sampled + index, mask=inside, other=0)
    slot = tl.load(slots + index, mask=inside, other=0)
    position = tl.load(positions + index, mask=inside, other=0)
    tl.store(results + index, sample, mask=inside)
    tl.store(tokens + slot * token_stride + position, tl.maximum(sample, 0), mask=inside)


def embed(
    tokens: torch.Tensor,
    block_tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
    embeddings: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.Ops.embed`."""
    count, columns = len(slots), embeddings.shape[1]
    out = torch.empty((count, columns), dtype=embeddings.dtype, device=embeddings.device)
    slot_mapping = torch.empty(count, dtype=torch.int64, device=embeddings.device)
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    _embed[(count, triton.cdiv(columns, block))](
        tokens,
        block_tables,
        slots,
        positions,
        embeddings,
        out,
        slot_mapping,
        tokens.stride(0),
        block_tables.stride(0),
        columns,
        block_size=block_size,
        block=block,
    )
    return out, slot_mapping


def store_samples(
    sampled: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """See `ops.Ops.store_samples`."""
    count = len(sampled)
    _store_samples[(triton.cdiv(count, _SAMPLES),)](
        sampled, slots, positions, tokens, results, tokens.stride(0), count, block=_SAMPLES
    )
