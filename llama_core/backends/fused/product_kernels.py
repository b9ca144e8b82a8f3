"""Matrix products of few rows, most with an epilogue that saves a further kernel: SwiGLU, or the addition to hidden states.

Reading the weights takes nearly all of their time. Weights stay as cuBLAS and checkpoints have them, [outputs, inputs]: a
program reads runs of 64 to 512 bytes of each of its outputs, which are whole sectors of the memory in any layout. For SwiGLU
a program takes outputs of gate and of up in turn, by their addresses. Where the outputs are too few for a large GPU, the
inputs of an addition are cut into splits, each in programs of its own; the kernel of the norm adds them in order.

A row's bits depend on its values, the weights and the number of rows, not on other rows' values.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from llama_core.backends.fused.layer_kernels import (
    early_launch,
    gated,
    has_much_shared_memory,
    let_next_start,
    plus_bias,
    wait_for_previous,
)
from llama_core.backends.weight_formats.format import Bias, HeldWeights
from llama_core.backends.weight_formats.tile_kernels import Tile, operand, product_of_tile
from llama_core.model.operations import Activation

# Rows of a product that reading the weights limits on every GPU of sm_80 and later. More rows go to cuBLAS.
MOST_ROWS: Final = 64
# (weights, rows) -> whether the product is ours. Nothing else decides, so that a step computes the same in a graph and outside.
Fuses = Callable[[HeldWeights, int], bool]
# The least programs for a product. An H100 has 132 multiprocessors, and 18 KB of reads must be in flight on each
# to keep its memory busy (3.35 TB/s for 0.7 us). One program with weights of 16 bits has 24 to 64 KB in the stages that it
# does not compute yet, one with codes of 4 bits has 6 to 12 KB.
_PROGRAMS: Final = 128
# Programs with 64 KB of shared memory that an H100 or H200 runs at once. Other GPUs were not tried.
_RESIDENT: Final = 3 * 132
# The least outputs of a product without splits: 64 a program, or 48 where there are tiles of 32 outputs for fewer.
_MANY_OUTPUTS: Final = 64 * _PROGRAMS
_MANY_OUTPUTS_WITH_NARROW_TILES: Final = 48 * _PROGRAMS
_LEAST_SPLIT: Final = 512  # inputs of a split: partial sums are memory traffic
_MOST_SPLITS: Final = 4


def never(weights: HeldWeights, rows: int) -> bool:
    """No product: all are cuBLAS's."""
    return False


def of_few_rows(weights: HeldWeights, rows: int) -> bool:
    """Products of at most MOST_ROWS rows, whose time is that of reading the weights: in bfloat16, our kernels are about as
    fast as cuBLAS or faster on an H100 and an H200, and save kernels. Not in float32, which uses no tensor cores: there
    the arithmetic of many rows takes the time."""
    return rows <= MOST_ROWS and weights.codes.dtype != torch.float32


class Tiles(NamedTuple):
    """Sizes and launch parameters of one program. width: codes of an output that one iteration reads. least_programs: with
    fewer, an addition splits its inputs, and the product with SwiGLU halves the outputs of a program."""

    rows: int
    outputs: int
    width: int
    num_stages: int
    num_warps: int = 4
    least_programs: int = _PROGRAMS

    @property
    def constants(self) -> dict[str, Any]:
        tile = Tile(self.rows, self.outputs, self.width, self.num_stages if self.rows == 1 else None)
        return {"tile": tile, "num_warps": self.num_warps, "num_stages": self.num_stages}


def tiles_of(weights: HeldWeights, rows: int, dtype: torch.dtype, is_gated: bool) -> Tiles:
    """The tiles of a product. is_gated: whether SwiGLU follows."""
    is_plain = weights.scales is None
    if has_much_shared_memory() and is_plain and dtype != torch.float32:
        return _large_plain_tiles(weights, rows, is_gated=is_gated)
    tiles = _tiles_by_format(weights, rows, dtype)
    return tiles if is_plain else tiles._replace(least_programs=2 * _PROGRAMS)


def _tiles_by_format(weights: HeldWeights, rows: int, dtype: torch.dtype) -> Tiles:
    is_plain, is_packed = weights.scales is None, weights.is_packed
    if dtype == torch.float32:  # no tensor cores, and both factors in registers
        return Tiles(16, 32, 32 if is_plain or is_packed else 64, 2)
    if is_packed and rows == 1:  # tensor cores would wait for factors that other threads expand
        return Tiles(1, 32, 128, 4)
    tile_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if has_much_shared_memory() and not is_packed:
        return _large_byte_tiles(weights, tile_rows)
    # Two scales of groups for each thread: the compiler copies no fewer than 4 bytes ahead of their use.
    if rows > 32:
        # Each program reads the activations: more outputs of a program are fewer reads.
        return Tiles(64, 64, 64, 4) if is_plain else Tiles(64, 32, 64, 3) if is_packed else Tiles(64, 64, 128, 3)
    if is_plain:
        return Tiles(tile_rows, 32, 128, 4)
    return Tiles(tile_rows, 32, 128 if is_packed else 256, 4 if tile_rows == 16 else 3)


def _large_plain_tiles(weights: HeldWeights, rows: int, *, is_gated: bool) -> Tiles:
    """Chosen on an H200, from the times of single products and of the layers of Llama 2 7B (1, 8 and 64 rows) and Llama 3 8B (1
    and 64 rows); those of other numbers of rows by analogy."""
    if is_gated:
        if rows > 32:
            # Of the smaller programs, a second wave would have few: 52 of 448 for Llama 3 8B.
            is_one_wave = triton.cdiv(len(weights.codes), 64) <= _RESIDENT
            return Tiles(64, 64, 64, 4) if is_one_wave else Tiles(64, 128, 64, 4, num_warps=8)
        return Tiles(16, 64, 128, 3) if rows <= 16 else Tiles(32, 64, 128, 4)
    has_many = has_many_outputs(weights)
    if rows == 1:  # reads more at a time where no thread waits for tensor cores
        return Tiles(1, 16, 256, 4 if has_many else 6, least_programs=2 * _PROGRAMS)
    if rows <= 16:
        return Tiles(16, 32, 128, 5 if has_many else 6, least_programs=2 * _PROGRAMS)
    is_narrow = has_many and len(weights.codes) < _MANY_OUTPUTS  # such as qkv of Llama 3 8B
    outputs = 32 if is_narrow else 64
    if rows <= 32:
        return Tiles(32, outputs, 128, 4)
    if not has_many:
        return Tiles(64, 64, 128, 5, num_warps=8)
    return Tiles(64, outputs, 128, 4 if is_narrow else 3)


def _large_byte_tiles(weights: HeldWeights, rows: int) -> Tiles:
    """Tiles for codes of 8 bits, chosen from those tried on an H100 with 1 and 64 rows; those of 32 rows by analogy."""
    if rows <= 32:
        return Tiles(rows, 64, 128, 4) if rows == 16 else Tiles(rows, 32, 256, 3)
    return Tiles(rows, 32, 128, 3) if has_many_outputs(weights) else Tiles(rows, 64, 128, 3)


def has_many_outputs(weights: HeldWeights) -> bool:
    """Whether `product` computes a product that neither an addition nor SwiGLU follows. An addition may be split anyway."""
    has_narrow_tiles = weights.scales is None and has_much_shared_memory()
    return len(weights.codes) >= (_MANY_OUTPUTS_WITH_NARROW_TILES if has_narrow_tiles else _MANY_OUTPUTS)


def _split_of(weights: HeldWeights, tiles: Tiles) -> int:
    """Codes of each split of an addition but the last."""
    outputs, width = weights.codes.shape
    wanted = triton.cdiv(tiles.least_programs, triton.cdiv(outputs, tiles.outputs))
    inputs = width * (2 if weights.is_packed else 1)
    num_splits = max(1, min(wanted, inputs // _LEAST_SPLIT, _MOST_SPLITS))
    return int(triton.cdiv(triton.cdiv(width, num_splits), tiles.width) * tiles.width)


# Without `do_not_specialize`, Triton compiles further variants for some numbers of rows while it serves.
@triton.jit(do_not_specialize=["rows"])
def _gated_product(
    x,
    weights,
    bias,
    out,
    rows,
    hidden,
    sizes,
    form: tl.constexpr,
    activation: tl.constexpr,
    tile: tl.constexpr,
    is_early: tl.constexpr,
):
    """Outputs 2 i and 2 i + 1 of a tile are output i of gate and of up, so that both meet in a thread."""
    wait_for_previous(is_early)
    block_hidden: tl.constexpr = tile.outputs // 2
    index = tl.arange(0, tile.outputs)
    of_hidden = tl.program_id(0) * block_hidden + index // 2
    output = of_hidden + index % 2 * hidden
    row = tl.program_id(1) * tile.rows + tl.arange(0, tile.rows)
    acc = product_of_tile(x, weights, sizes, row, output, of_hidden < hidden, rows, 0, sizes.width, form, tile)
    gate, up = tl.split(tl.reshape(acc.to(out.dtype.element_ty), (tile.rows, block_hidden, 2)))
    column = tl.program_id(0) * block_hidden + tl.arange(0, block_hidden)
    if bias is not None:
        gate = plus_bias(gate, bias + column[None, :], (column < hidden)[None, :])
        up = plus_bias(up, bias + hidden + column[None, :], (column < hidden)[None, :])
    target = out + row[:, None].to(tl.int64) * hidden + column[None, :]
    tl.store(target, gated(gate, up, activation), mask=(row < rows)[:, None] & (column < hidden)[None, :])
    let_next_start(is_early)  # not sooner: the next kernel is a product


@triton.jit(do_not_specialize=["rows"])
def _product_of_rows(
    x,
    weights,
    bias,
    out,
    rows,
    outputs,
    sizes,
    split,
    form: tl.constexpr,
    is_added: tl.constexpr,
    is_split: tl.constexpr,
    tile: tl.constexpr,
    is_early: tl.constexpr,
):
    """out [rows, outputs] = the product, or, with is_added, += the product + bias. is_split: each program computes `split`
    codes of each output, and stores its sums to `out`, float32 [splits, rows, outputs]."""
    wait_for_previous(is_early)
    let_next_start(is_early)
    output = tl.program_id(0) * tile.outputs + tl.arange(0, tile.outputs)
    row = tl.program_id(1) * tile.rows + tl.arange(0, tile.rows)
    begin = tl.program_id(2) * split
    end = tl.minimum(begin + split, sizes.width)
    acc = product_of_tile(x, weights, sizes, row, output, output < outputs, rows, begin, end, form, tile)
    inside = (row < rows)[:, None] & (output < outputs)[None, :]
    target = row[:, None].to(tl.int64) * outputs + output[None, :]
    if is_split:
        tl.store(out + tl.program_id(2).to(tl.int64) * rows * outputs + target, acc, mask=inside)
    elif not is_added:
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=inside)
    else:
        added = acc.to(out.dtype.element_ty)
        if bias is not None:
            added = plus_bias(added, bias + output[None, :], (output < outputs)[None, :])
        states = tl.load(out + target, mask=inside, other=0.0)
        tl.store(out + target, (states.to(tl.float32) + added.to(tl.float32)).to(states.dtype), mask=inside)


def gated_product(x: torch.Tensor, weights: HeldWeights, bias: Bias, activation: Activation = "silu") -> torch.Tensor:
    """activation(gate) * up for gate and up of x [T, inputs] times weights [2 * hidden, inputs], gate first, + bias: [T,
    hidden]."""
    x = x.contiguous()
    (rows, inputs), outputs = x.shape, len(weights.codes)
    hidden, tiles = outputs // 2, tiles_of(weights, len(x), x.dtype, True)
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    if triton.cdiv(outputs, tiles.outputs) < tiles.least_programs:
        tiles = tiles._replace(outputs=tiles.outputs // 2)
    held, sizes, form = operand(weights, inputs)
    grid = triton.cdiv(hidden, tiles.outputs // 2), triton.cdiv(rows, tiles.rows)
    _gated_product[grid](x, held, bias, out, rows, hidden, sizes, form, activation, **tiles.constants, **early_launch())
    return out


def add_product(hidden_states: torch.Tensor, x: torch.Tensor, weights: HeldWeights, bias: Bias) -> torch.Tensor | None:
    """hidden_states [T, outputs] += x [T, inputs] times weights + bias, in place.

    Where the inputs are split, the hidden states stay as they are, and the result is the sums of the splits without the bias,
    float32 [splits, T, outputs].
    """
    tiles = tiles_of(weights, len(x), x.dtype, False)
    split = _split_of(weights, tiles)
    num_splits = triton.cdiv(weights.codes.shape[1], split)
    if num_splits == 1:
        _launch_product(x, weights, hidden_states, tiles, split, bias, is_added=True)
        return None
    partial = torch.empty((num_splits, *hidden_states.shape), dtype=torch.float32, device=x.device)
    _launch_product(x, weights, partial, tiles, split, None, is_added=True)
    return partial


def product(x: torch.Tensor, weights: HeldWeights) -> torch.Tensor:
    """x [T, inputs] times weights [outputs, inputs]: [T, outputs]."""
    outputs, width = weights.codes.shape
    out = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
    _launch_product(x, weights, out, tiles_of(weights, len(x), x.dtype, False), width, None, is_added=False)
    return out


def _launch_product(
    x: torch.Tensor, weights: HeldWeights, out: torch.Tensor, tiles: Tiles, split: int, bias: Bias, *, is_added: bool
) -> None:
    """split: codes of each split. bias: None where there are several splits."""
    x = x.contiguous()
    (rows, inputs), (outputs, width) = x.shape, weights.codes.shape
    num_splits = triton.cdiv(width, split)
    held, sizes, form = operand(weights, inputs)
    options = {"is_added": is_added, "is_split": num_splits > 1, **tiles.constants, **early_launch()}
    grid = triton.cdiv(outputs, tiles.outputs), triton.cdiv(rows, tiles.rows), num_splits
    _product_of_rows[grid](x, held, bias, out, rows, outputs, sizes, split, form, **options)
