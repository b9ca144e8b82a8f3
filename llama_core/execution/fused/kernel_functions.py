"""What several kernels do with a row or a tile, with the same rounding: to the model's dtype after each operation."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


def norm_warps(dim: int) -> int:
    """Warps of every kernel that calls `store_norm`: the order in which a row's squares are added depends on them, so kernels
    with the same rows have the same bits only with the same number."""
    return 8 if dim >= 4096 else 4


@triton.jit
def plus_bias(x, bias, inside):
    return (x.to(tl.float32) + tl.load(bias, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)


@triton.jit
def _times(x, factor, inside):
    return (x.to(tl.float32) * tl.load(factor, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)


@triton.jit
def store_norm(out, x, weight, inside, dim, eps):
    """RMSNorm of one row, to `out`."""
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / dim + eps)).to(x.dtype)
    tl.store(out, _times(normed, weight, inside), mask=inside)


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
