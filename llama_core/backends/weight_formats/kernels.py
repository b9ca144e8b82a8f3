"""Products with quantized weights in Triton: weights are dequantized in registers, tile by tile."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl

from llama_core.backends.weight_formats.format import HeldWeights
from llama_core.backends.weight_formats.tile_kernels import Format, product_of_tile


# Without `do_not_specialize`, Triton compiles further variants for some numbers of rows while it serves.
@triton.jit(do_not_specialize=["rows"])
def _multiply(
    x,
    codes,
    scales,
    minima,
    out,
    rows,
    outputs,
    inputs,
    width,
    groups,
    is_plain: tl.constexpr,
    is_packed: tl.constexpr,
    has_groups: tl.constexpr,
    has_minima: tl.constexpr,
    is_fp8: tl.constexpr,
    block_rows: tl.constexpr,
    block_outputs: tl.constexpr,
    block_width: tl.constexpr,
    buffers: tl.constexpr,
):
    output = tl.program_id(0) * block_outputs + tl.arange(0, block_outputs)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    is_output = output < outputs
    acc = product_of_tile(
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
        0,
        width,
        is_plain,
        is_packed,
        has_groups,
        has_minima,
        is_fp8,
        block_rows,
        block_outputs,
        block_width,
        buffers,
    )
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
    """x [T, inputs] -> [T, outputs]. codes, scales, minima: `HeldWeights`. batch_invariant: the same tiles for any T, because
    other tiles may use instructions that add in another order."""
    x = x.contiguous()
    rows, inputs = x.shape
    outputs, width = codes.shape
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    # float32 products use no tensor cores, and hold both factors in registers.
    is_wide = x.dtype == torch.float32
    is_decode = (rows <= 32 and not batch_invariant) or is_wide
    # Of one row each thread sums what it expands: tensor cores would wait for factors that other threads expand.
    is_one_row = rows == 1 and is_packed and not batch_invariant and not is_wide
    block_rows = 1 if is_one_row else 64 if not is_decode else 16 if rows <= 16 or is_wide else 32
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
        width,
        scales.shape[1] if scales.ndim == 2 else 1,
        *Format.of(HeldWeights(codes, scales, minima, is_packed)),
        block_rows=block_rows,
        block_outputs=block_outputs,
        block_width=128 if is_one_row else 32 if is_packed else 64,
        buffers=4 if is_one_row else None,
        num_warps=4,
    )
    return out
