"""Triton kernels before the layers and after sampling: `embed` gathers tokens and embeddings and computes the slot mapping;
`store_samples` writes samples to the slots and to the results. Each replaces several small kernels of torch.
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
    slot_tokens,
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
    column_block: tl.constexpr,
):
    """Some columns of one token's embedding; the first program of each token also writes its slot mapping."""
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    token = tl.load(slot_tokens + slot * token_stride + position)
    if tl.program_id(1) == 0:
        block_number = tl.load(block_tables + slot * table_stride + position // block_size)
        tl.store(slot_mapping + row, block_number * block_size + position % block_size)
    column = tl.program_id(1) * column_block + tl.arange(0, column_block)
    inside = column < columns
    tl.store(
        out + row * columns + column,
        tl.load(embeddings + token * columns + column, mask=inside, other=0.0),
        mask=inside,
    )


@triton.jit(do_not_specialize=["token_stride", "count"])
def _store_samples(sampled, slots, positions, slot_tokens, results, token_stride, count, block: tl.constexpr):
    """Store one block of samples."""
    index = tl.program_id(0) * block + tl.arange(0, block)
    inside = index < count
    sample = tl.load(sampled + index, mask=inside, other=0)
    slot = tl.load(slots + index, mask=inside, other=0)
    position = tl.load(positions + index, mask=inside, other=0)
    tl.store(results + index, sample, mask=inside)
    tl.store(slot_tokens + slot * token_stride + position, tl.maximum(sample, 0), mask=inside)


def embed(
    slot_tokens: torch.Tensor,
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
    column_block = min(_COLUMNS, triton.next_power_of_2(columns))
    _embed[(count, triton.cdiv(columns, column_block))](
        slot_tokens,
        block_tables,
        slots,
        positions,
        embeddings,
        out,
        slot_mapping,
        slot_tokens.stride(0),
        block_tables.stride(0),
        columns,
        block_size=block_size,
        column_block=column_block,
    )
    return out, slot_mapping


def store_samples(
    sampled: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    slot_tokens: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """See `ops.Ops.store_samples`."""
    count = len(sampled)
    _store_samples[(triton.cdiv(count, _SAMPLES),)](
        sampled, slots, positions, slot_tokens, results, slot_tokens.stride(0), count, block=_SAMPLES
    )
