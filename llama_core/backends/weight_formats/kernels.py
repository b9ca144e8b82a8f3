"""Products with quantized weights in Triton: weights are dequantized in registers, tile by tile."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl

from llama_core.backends.weight_formats.format import HeldWeights
from llama_core.backends.weight_formats.tile_kernels import Tile, operand, product_of_tile


# Without `do_not_specialize`, Triton compiles further variants for some numbers of rows while it serves.
@triton.jit(do_not_specialize=["rows"])
def _multiply(x, weights, out, rows, outputs, sizes, form: tl.constexpr, tile: tl.constexpr):
    output = tl.program_id(0) * tile.outputs + tl.arange(0, tile.outputs)
    row = tl.program_id(1) * tile.rows + tl.arange(0, tile.rows)
    is_output = output < outputs
    acc = product_of_tile(x, weights, sizes, row, output, is_output, rows, 0, sizes.width, form, tile)
    target = out + row[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & is_output[None, :])


def multiply(x: torch.Tensor, weights: HeldWeights, *, batch_invariant: bool = False) -> torch.Tensor:
    """x [T, inputs] -> [T, outputs]. batch_invariant: the same tiles for any T, because other tiles may use instructions that
    add in another order."""
    x = x.contiguous()
    (rows, inputs), outputs, is_packed = x.shape, len(weights.codes), weights.is_packed
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    # float32 products use no tensor cores, and hold both factors in registers.
    is_wide = x.dtype == torch.float32
    is_decode = (rows <= 32 and not batch_invariant) or is_wide
    # Of one row each thread sums what it expands: tensor cores would wait for factors that other threads expand.
    is_one_row = rows == 1 and is_packed and not batch_invariant and not is_wide
    tile_rows = 1 if is_one_row else 64 if not is_decode else 16 if rows <= 16 or is_wide else 32
    width = 128 if is_one_row else 32 if is_packed else 64
    tile = Tile(tile_rows, 32 if is_decode else 64, width, 4 if is_one_row else None)
    held, sizes, form = operand(weights, inputs)
    grid = triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, tile.rows)
    _multiply[grid](x, held, out, rows, outputs, sizes, form, tile, num_warps=4)
    return out
