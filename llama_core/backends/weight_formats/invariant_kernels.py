"""Products with weights in the model's dtype whose bits do not depend on the number of rows, in Triton.

Libraries choose tiles, and with them the order of a sum, by the number of rows. Here both depend on the matrix alone: its
inputs are cut into splits, each split is summed in blocks of the same size, and the splits are added in order. Few rows leave
most of a GPU idle, so each split is then a program of its own.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

_PROGRAMS: Final = 128  # that few rows are spread over at least, about one for each multiprocessor of a large GPU
_LEAST_SPLIT: Final = 512  # inputs of a split: partial sums are memory traffic
_SUMMED_OUTPUTS: Final = 1024  # that one program adds up over the splits


class _Tile(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    num_stages: int


def _tile_of(dtype: torch.dtype) -> _Tile:
    """The same for any number of rows: other tiles may use other instructions, which add in another order."""
    # float32 products use no tensor cores, and hold both factors in registers.
    return _Tile(16, 32, 32, 2) if dtype == torch.float32 else _Tile(64, 128, 64, 3)


def split_inputs(outputs: int, inputs: int, dtype: torch.dtype) -> int:
    """Inputs of each split but the last, a multiple of a tile's."""
    tile = _tile_of(dtype)
    wanted = triton.cdiv(_PROGRAMS, triton.cdiv(outputs, tile.outputs))
    num_splits = max(1, min(wanted, inputs // _LEAST_SPLIT))
    return int(triton.cdiv(triton.cdiv(inputs, num_splits), tile.inputs) * tile.inputs)


@triton.jit
def _split_sum(x, weight, row, output, rows, outputs, inputs, begin, end, tile: tl.constexpr):
    """x[row, begin:end] @ weight[output, begin:end].T in float32."""
    acc = tl.full([tile.rows, tile.outputs], 0.0, tl.float32)
    of_row, of_output = row.to(tl.int64) * inputs, output.to(tl.int64) * inputs
    for first in range(begin, end, tile.inputs):
        column = first + tl.arange(0, tile.inputs)
        inside = column < inputs
        left = tl.load(x + of_row[:, None] + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        right = tl.load(
            weight + of_output[:, None] + column[None, :], mask=(output < outputs)[:, None] & inside[None, :], other=0.0
        )
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    return acc


# Without `do_not_specialize`, Triton compiles a further variant for some numbers of rows while it serves.
@triton.jit(do_not_specialize=["rows"])
def _multiply_in_order(x, weight, out, rows, outputs, inputs, split, is_split: tl.constexpr, tile: tl.constexpr):
    """is_split: each program computes one split, `out` is float32 [splits, rows, outputs]; else all, [rows, outputs]."""
    row = tl.program_id(0) * tile.rows + tl.arange(0, tile.rows)
    output = tl.program_id(1) * tile.outputs + tl.arange(0, tile.outputs)
    is_inside = (row < rows)[:, None] & (output < outputs)[None, :]
    target = row[:, None].to(tl.int64) * outputs + output[None, :]
    if is_split:
        begin = tl.program_id(2) * split
        end = tl.minimum(begin + split, inputs)
        acc = _split_sum(x, weight, row, output, rows, outputs, inputs, begin, end, tile)
        place = out + tl.program_id(2).to(tl.int64) * rows * outputs + target
        tl.store(place, acc, mask=is_inside)
    else:
        total = tl.full([tile.rows, tile.outputs], 0.0, tl.float32)
        for begin in range(0, inputs, split):
            end = tl.minimum(begin + split, inputs)
            total += _split_sum(x, weight, row, output, rows, outputs, inputs, begin, end, tile)
        tl.store(out + target, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["rows"])
def _add_splits(partial, out, rows, outputs, num_splits, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = output < outputs
    total = tl.zeros([block], tl.float32)
    for split in range(0, num_splits):
        total += tl.load(partial + (split * rows + row) * outputs + output, mask=is_inside, other=0.0)
    tl.store(out + row * outputs + output, total.to(out.dtype.element_ty), mask=is_inside)


def multiply_in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, inputs] -> [T, outputs] for weight [outputs, inputs] of the same dtype. Row t's bits depend on x[t] and the weight
    alone, on one type of GPU."""
    x = x.contiguous()
    (rows, inputs), outputs = x.shape, len(weight)
    tile = _tile_of(x.dtype)
    split = split_inputs(outputs, inputs, x.dtype)
    num_splits = triton.cdiv(inputs, split)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    # More rows than a tile has occupy the GPU without splits, whose partial sums would grow with the rows.
    is_split = num_splits > 1 and rows <= tile.rows
    partial = torch.empty((num_splits, rows, outputs), dtype=torch.float32, device=x.device) if is_split else out
    grid = triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs), num_splits if is_split else 1
    options = {"is_split": is_split, "tile": tile, "num_warps": 4, "num_stages": tile.num_stages}
    _multiply_in_order[grid](x, weight, partial, rows, outputs, inputs, split, **options)
    if is_split:
        block = min(_SUMMED_OUTPUTS, triton.next_power_of_2(outputs))
        _add_splits[(rows, triton.cdiv(outputs, block))](partial, out, rows, outputs, num_splits, block=block)
    return out
