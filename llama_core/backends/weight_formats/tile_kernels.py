"""The part that all products with weights of a format share in Triton: a tile of activations times a tile of weights.

Quantized weights are dequantized in registers, block by block. float8_e4m3fn are bytes, because GPUs before sm_89 have no such
type: four bits of exponent with a bias of 7, three of mantissa, no infinities, largest value 448 (Micikevicius et al. 2022).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import NamedTuple

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

    @classmethod
    def of(cls, weights: HeldWeights) -> "Format":
        codes, scales, minima, is_packed = weights
        is_fp8 = scales is not None and not is_packed and codes.dtype == torch.uint8
        return cls(scales is None, is_packed, scales is not None and scales.ndim == 2, minima is not None, is_fp8)


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
def _of_groups(
    values,
    output,
    is_output,
    groups,
    first,
    is_packed: tl.constexpr,
    block_outputs: tl.constexpr,
    block_width: tl.constexpr,
):
    """The scale or minimum of each code from `first`, float32 [block_outputs, block_width]: one load for each group."""
    width: tl.constexpr = _GROUP // 2 if is_packed else _GROUP
    count: tl.constexpr = block_width // width
    group = first // width + tl.arange(0, count)
    inside = is_output[:, None] & (group < groups)[None, :]
    of_group = tl.load(values + output[:, None] * groups + group[None, :], mask=inside, other=0.0).to(tl.float32)
    every = tl.broadcast_to(of_group[:, :, None], (block_outputs, count, width))
    return tl.reshape(every, (block_outputs, block_width))


@triton.jit
def product_of_tile(
    x,
    codes,
    scales,
    minima,
    row,
    output,
    is_output,
    rows,
    inputs,
    width,
    groups,
    begin,
    end,
    is_plain: tl.constexpr,
    is_packed: tl.constexpr,
    has_groups: tl.constexpr,
    has_minima: tl.constexpr,
    is_fp8: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_width: tl.constexpr,
    num_stages: tl.constexpr = None,
):
    """x[row] @ weights[output].T in float32 [block_rows, block_outputs], over the codes begin .. end of each output.

    x [rows, inputs]. codes [outputs, width]: weights, or bytes. begin is a multiple of block_width, and block_width of a
    group's codes. With block_rows 1 each thread sums what it reads, without tensor cores; the compiler then has to be told
    num_stages, of loads ahead of their use.
    """
    wide_output = output.to(tl.int64)
    is_one_row: tl.constexpr = block_rows == 1
    acc = tl.zeros([block_outputs, block_width] if is_one_row else [block_rows, block_outputs], tl.float32)
    for first in tl.range(begin, end, block_width, num_stages=num_stages):
        place = first + tl.arange(0, block_width)
        inside = is_output[:, None] & (place < width)[None, :]
        source = codes + wide_output[:, None] * width + place[None, :]
        if is_plain:
            weights = tl.load(source, mask=inside, other=0.0)
            acc = _add_product(acc, x, weights, row, place, rows, inputs, is_one_row)
        else:
            loaded = tl.load(source, mask=inside, other=0)
            if has_groups:
                scale = _of_groups(scales, wide_output, is_output, groups, first, is_packed, block_outputs, block_width)
            if is_packed:
                # Byte j of a group has code j in its low half, and code j + 16 in its high half.
                column = place // (_GROUP // 2) * _GROUP + place % (_GROUP // 2)
                low, high = (loaded & 15).to(tl.float32), (loaded >> 4).to(tl.float32)
                if has_minima:
                    least = _of_groups(
                        minima, wide_output, is_output, groups, first, is_packed, block_outputs, block_width
                    )
                    acc = _add_product(acc, x, low * scale + least, row, column, rows, inputs, is_one_row)
                    acc = _add_product(
                        acc, x, high * scale + least, row, column + _GROUP // 2, rows, inputs, is_one_row
                    )
                else:
                    acc = _add_product(acc, x, (low - 8) * scale, row, column, rows, inputs, is_one_row)
                    acc = _add_product(acc, x, (high - 8) * scale, row, column + _GROUP // 2, rows, inputs, is_one_row)
            else:
                weights = from_float8(loaded) if is_fp8 else loaded.to(tl.float32)
                if has_groups:
                    weights = weights * scale
                acc = _add_product(acc, x, weights, row, place, rows, inputs, is_one_row)
    if is_one_row:
        acc = tl.sum(acc, axis=1)[None, :]
    if not is_plain and not has_groups:
        acc = acc * tl.load(scales + output, mask=is_output, other=0.0)[None, :]
    return acc
