"""Products with quantized weights in Triton: weights are dequantized in registers, tile by tile."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl

from llama_core.execution.float8_kernels import from_float8

_GROUP = tl.constexpr(32)


@triton.jit
def _add_product(acc, x, weights, row, column, rows, inputs):
    """acc [rows, outputs] + x[row, column] @ weights [outputs, columns]."""
    inside = (row[:, None] < rows) & (column[None, :] < inputs)
    part = tl.load(x + row[:, None].to(tl.int64) * inputs + column[None, :], mask=inside, other=0.0)
    return acc + tl.dot(part, tl.trans(weights.to(part.dtype)), input_precision="ieee")


@triton.jit
def _multiply(
    x,
    codes,
    scales,
    minima,
    out,
    rows,
    outputs,
    inputs,
    row_bytes,
    groups,
    is_packed: tl.constexpr,
    has_groups: tl.constexpr,
    has_minima: tl.constexpr,
    is_fp8: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_bytes: tl.constexpr,
):
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    is_output = output < outputs
    wide_output = output.to(tl.int64)
    acc = tl.zeros([block_rows, block_outputs], tl.float32)
    for first in range(0, row_bytes, block_bytes):
        byte = first + tl.arange(0, block_bytes)
        inside = is_output[:, None] & (byte < row_bytes)[None, :]
        loaded = tl.load(codes + wide_output[:, None] * row_bytes + byte[None, :], mask=inside, other=0)
        if has_groups:
            group = byte // (_GROUP // 2 if is_packed else _GROUP)
            of_group = wide_output[:, None] * groups + group[None, :]
            scale = tl.load(scales + of_group, mask=inside, other=0.0).to(tl.float32)
        if is_packed:
            # Byte j of a group has code j in its low half, and code j + 16 in its high half.
            column = group * _GROUP + byte % (_GROUP // 2)
            low, high = (loaded & 15).to(tl.float32), (loaded >> 4).to(tl.float32)
            if has_minima:
                least = tl.load(minima + of_group, mask=inside, other=0.0).to(tl.float32)
                acc = _add_product(acc, x, low * scale + least, row, column, rows, inputs)
                acc = _add_product(acc, x, high * scale + least, row, column + _GROUP // 2, rows, inputs)
            else:
                acc = _add_product(acc, x, (low - 8) * scale, row, column, rows, inputs)
                acc = _add_product(acc, x, (high - 8) * scale, row, column + _GROUP // 2, rows, inputs)
        else:
            weights = from_float8(loaded) if is_fp8 else loaded.to(tl.float32)
            if has_groups:
                weights = weights * scale
            acc = _add_product(acc, x, weights, row, byte, rows, inputs)
    if not has_groups:
        acc = acc * tl.load(scales + output, mask=is_output, other=0.0)[None, :]
    target = out + row[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & is_output[None, :])


def multiply(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor | None,
    *,
    is_packed: bool,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """x [T, inputs] -> [T, outputs]. codes: [outputs, bytes of a row], int8, or uint8 where they are packed or float8_e4m3fn.
    scales: float16 [outputs, groups], or float32 [outputs]. batch_invariant: the same tiles for any T, because other tiles may
    use instructions that add in another order."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs, row_bytes = codes.shape
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    # float32 products use no tensor cores, and hold both factors in registers.
    is_wide = x.dtype == torch.float32
    is_decode = (rows <= 32 and not batch_invariant) or is_wide
    block_rows = 64 if not is_decode else 16 if rows <= 16 or is_wide else 32
    block_outputs = 32 if is_decode else 64
    _multiply[(triton.cdiv(outputs, block_outputs), triton.cdiv(rows, block_rows))](
        x,
        codes,
        scales,
        scales if minima is None else minima,
        out,
        rows,
        outputs,
        inputs,
        row_bytes,
        scales.shape[1] if scales.ndim == 2 else 1,
        is_packed=is_packed,
        has_groups=scales.ndim == 2,
        has_minima=minima is not None,
        is_fp8=not is_packed and codes.dtype == torch.uint8,
        block_rows=block_rows,
        block_outputs=block_outputs,
        block_bytes=32 if is_packed else 64,
        num_warps=4,
    )
    return out
