"""The part that all products with weights of a format share in Triton: a tile of activations times a tile of weights.

Quantized weights are dequantized in registers, block by block. float8_e4m3fn are bytes, because GPUs before sm_89 have no such
type: four bits of exponent with a bias of 7, three of mantissa, no infinities, largest value 448 (Micikevicius et al. 2022).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from llama_core.backends.weight_formats.format import HeldWeights

_GROUP = tl.constexpr(32)
_LARGEST = tl.constexpr(448.0)
_LEAST_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def from_float8(byte):
    """float32 values of bytes.

    float16 has the same order of fields and a bias of 15 instead of 7: shifted, each value is 2^8 too small, also a subnormal.
    """
    wide = byte.to(tl.int16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def to_float8(x):
    """Bytes of the nearest values, ties to even; what is larger than the largest becomes the largest."""
    wide = x.to(tl.float32)
    sign = (wide.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(wide), _LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    # The upper 12 bits are exponent and mantissa, with a bias of 127 instead of 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # A sum with 2^14 has units of 2^-9, the least subnormal; its bits count them.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(size < _LEAST_NORMAL, subnormal, normal) | sign).to(tl.uint8)


class Format(NamedTuple):
    """Of weights, for a kernel. is_plain: in the dtype of the activations. is_packed: two codes a byte. has_groups: a scale for
    each group of inputs. is_fp8: bytes of float8_e4m3fn."""

    is_plain: bool
    is_packed: bool
    has_groups: bool
    has_minima: bool
    is_fp8: bool


class Weights(NamedTuple):
    """`HeldWeights` as an argument of a kernel: pointers, None where the format has none."""

    codes: Any
    scales: Any
    minima: Any


class Sizes(NamedTuple):
    """Of the weights of one output: inputs, codes and groups."""

    inputs: int
    width: int
    groups: int


class Tile(NamedTuple):
    """What a program computes: rows and outputs. width: codes of an output that one iteration reads. buffers: loads ahead of
    their use, None where the compiler finds them by itself."""

    rows: int
    outputs: int
    width: int
    buffers: int | None = None


def operand(weights: HeldWeights, inputs: int) -> tuple[Weights, Sizes, Format]:
    """Arguments of a kernel that multiplies with these weights [outputs, inputs]."""
    codes, scales, minima, is_packed = weights
    is_fp8 = scales is not None and not is_packed and codes.dtype == torch.uint8
    has_groups = scales is not None and scales.ndim == 2
    groups = scales.shape[1] if scales is not None and has_groups else 1
    form = Format(scales is None, is_packed, has_groups, minima is not None, is_fp8)
    return Weights(codes, scales, minima), Sizes(inputs, codes.shape[1], groups), form


@triton.jit
def _add_product(acc, x, weights, row, column, rows, inputs, is_one_row: tl.constexpr):
    """acc [rows, outputs] + x[row, column] @ weights [outputs, columns]. is_one_row: acc [outputs, columns] + the products that
    are not summed yet."""
    if is_one_row:
        part = tl.load(x + row.to(tl.int64) * inputs + column, mask=column < inputs, other=0.0)
        acc += weights.to(tl.float32) * part.to(tl.float32)[None, :]
    else:
        inside = (row[:, None] < rows) & (column[None, :] < inputs)
        part = tl.load(x + row[:, None].to(tl.int64) * inputs + column[None, :], mask=inside, other=0.0)
        acc += tl.dot(part, tl.trans(weights.to(part.dtype)), input_precision="ieee")
    return acc


@triton.jit
def _of_groups(values, groups, output, is_output, first, form: tl.constexpr, tile: tl.constexpr):
    """The scale or minimum of each code from `first`, float32 [tile.outputs, tile.width]: one load for each group."""
    width: tl.constexpr = _GROUP // 2 if form.is_packed else _GROUP
    count: tl.constexpr = tile.width // width
    group = first // width + tl.arange(0, count)
    inside = is_output[:, None] & (group < groups)[None, :]
    place = values + output[:, None] * groups + group[None, :]
    of_group = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    every = tl.broadcast_to(of_group[:, :, None], (tile.outputs, count, width))
    return tl.reshape(every, (tile.outputs, tile.width))


@triton.jit
def product_of_tile(
    x, weights, sizes, row, output, is_output, rows, begin, end, form: tl.constexpr, tile: tl.constexpr
):
    """x[row] @ weights[output].T in float32 [tile.rows, tile.outputs], over the codes begin .. end of each output.

    x [rows, inputs]. weights.codes [outputs, width]: weights, or bytes. begin is a multiple of tile.width, and tile.width of a
    group's codes. With one row each thread sums what it reads, without tensor cores; the compiler then has to be told
    tile.buffers.
    """
    wide_output = output.to(tl.int64)
    is_one_row: tl.constexpr = tile.rows == 1
    acc = tl.full([tile.outputs, tile.width] if is_one_row else [tile.rows, tile.outputs], 0.0, tl.float32)
    for first in tl.range(begin, end, tile.width, num_stages=tile.buffers):
        place = first + tl.arange(0, tile.width)
        inside = is_output[:, None] & (place < sizes.width)[None, :]
        source = weights.codes + wide_output[:, None] * sizes.width + place[None, :]
        if form.is_plain:
            values = tl.load(source, mask=inside, other=0.0)
            acc = _add_product(acc, x, values, row, place, rows, sizes.inputs, is_one_row)
        else:
            loaded = tl.load(source, mask=inside, other=0)
            if form.has_groups:
                scale = _of_groups(weights.scales, sizes.groups, wide_output, is_output, first, form, tile)
            if form.is_packed:
                # Byte j of a group has code j in its low half, and code j + 16 in its high half.
                column = place // (_GROUP // 2) * _GROUP + place % (_GROUP // 2)
                low, high = (loaded & 15).to(tl.float32), (loaded >> 4).to(tl.float32)
                if form.has_minima:
                    least = _of_groups(weights.minima, sizes.groups, wide_output, is_output, first, form, tile)
                    acc = _add_product(acc, x, low * scale + least, row, column, rows, sizes.inputs, is_one_row)
                    low_end = column + _GROUP // 2
                    acc = _add_product(acc, x, high * scale + least, row, low_end, rows, sizes.inputs, is_one_row)
                else:
                    acc = _add_product(acc, x, (low - 8) * scale, row, column, rows, sizes.inputs, is_one_row)
                    acc = _add_product(
                        acc, x, (high - 8) * scale, row, column + _GROUP // 2, rows, sizes.inputs, is_one_row
                    )
            else:
                values = from_float8(loaded) if form.is_fp8 else loaded.to(tl.float32)
                if form.has_groups:
                    values = values * scale
                acc = _add_product(acc, x, values, row, place, rows, sizes.inputs, is_one_row)
    if is_one_row:
        acc = tl.sum(acc, axis=1)[None, :]
    if not form.is_plain and not form.has_groups:
        acc = acc * tl.load(weights.scales + output, mask=is_output, other=0.0)[None, :]
    return acc
