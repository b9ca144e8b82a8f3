"""Converts the rows of a step to tensors: tokens, positions, and their slot mapping and block tables in the cache."""

from collections.abc import Sequence as Seq

import torch

from llama_core.execution.kv_cache import AttentionMetadata, PrefillRow
from llama_core.execution.slots import SlotTable
from llama_core.scheduling.step import Row


def sample_positions(rows: Seq[Row], ends: Seq[int]) -> list[tuple[int, int, int]]:
    """For each sample: the index of the step's token after which it is sampled, its slot and its position. `ends`: of the rows.

    A row samples after its last 1 + num_drafts tokens.
    """
    return [
        (end - back, row.slot, row.start + row.length + 1 - back)
        for row, end in zip(rows, ends, strict=True)
        if row.samples
        for back in range(row.num_drafts + 1, 0, -1)
    ]


def build_metadata(
    rows: Seq[Row], slots: SlotTable, block_size: int
) -> tuple[torch.Tensor, AttentionMetadata, list[int]]:
    """The step's tokens int64 [T], their attention metadata, and the end of each row in T."""
    device = slots.tokens.device
    ends: list[int] = []
    total = 0
    for row in rows:
        total += row.length
        ends.append(total)
    columns = torch.tensor([[row.slot, row.start, row.length] for row in rows], device=device)
    slot_of_row, start_of_row, count_of_row = columns.unbind(1)
    row_of_token = torch.repeat_interleave(torch.arange(len(rows), device=device), count_of_row, output_size=total)
    offset = torch.arange(total, device=device) - (count_of_row.cumsum(0) - count_of_row)[row_of_token]
    positions = start_of_row[row_of_token] + offset
    slot_of_token = slot_of_row[row_of_token]
    blocks = slots.block_tables[slot_of_token, positions // block_size]

    decodes = [i for i, row in enumerate(rows) if row.length == 1]
    longest = max((rows[i].start + 1 for i in decodes), default=0)
    decode_rows = torch.tensor(decodes, dtype=torch.int64, device=device)
    prefills = []
    for i, row in enumerate(rows):
        if row.length > 1:
            seen = torch.arange(row.start + row.length, device=device)
            keys = slots.block_tables[row.slot, seen // block_size] * block_size + seen % block_size
            prefills.append(PrefillRow(ends[i] - row.length, ends[i], row.start, keys))
    metadata = AttentionMetadata(
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        decode_index=torch.tensor([ends[i] - 1 for i in decodes], dtype=torch.int64, device=device),
        decode_block_tables=slots.block_tables[slot_of_row[decode_rows], : -(-longest // block_size)],
        decode_lengths=start_of_row[decode_rows] + 1,
        prefills=prefills,
    )
    return slots.tokens[slot_of_token, positions], metadata, ends
