"""Functions that several kernels share: programmatic dependent launch, and operations on a row or tile, each of which rounds
its result to the model's dtype.

With programmatic dependent launch (CUDA, sm_90 and later) a kernel's programs start while the kernel before still runs, so that
the launch takes no time of its own. Norms, the rotary embedding, attention and the products of few rows are launched this way.
Before a program waits for the kernel before, it loads only what no kernel of the layers writes: norms' weights, positions,
the slot mapping, the rotary table and tiles of attention. Kernels without programmatic dependent launch write these before
the layers begin; the first norm waits for them, before it lets any other kernel of the layers start.

Each kernel says when the next one may start. Products of 1 or 8 rows that start beside another product take longer than after
it, probably because their programs are spread unevenly over the multiprocessors. So a kernel lets a following product start
only after its own wait, which ends when all earlier kernels have ended. `_gated_product` does so at its end.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from functools import cache
from typing import Final

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

_LEAST_SM: Final = 90  # the first with programmatic dependent launch


@cache
def has_early_launch() -> bool:
    """Whether kernels run on a GPU with programmatic dependent launch, rather than in Triton's interpreter."""
    if triton.knobs.runtime.interpret:
        return False
    try:
        target = driver.active.get_current_target()
    except RuntimeError:  # no GPU
        return False
    return bool(target.backend == "cuda" and target.arch >= _LEAST_SM)


def early_launch() -> dict[str, bool]:
    """Launch options of a kernel that calls `wait_for_previous`."""
    return {"is_early": True, "launch_pdl": True} if has_early_launch() else {"is_early": False}


@triton.jit
def let_next_start(is_early: tl.constexpr):
    """Let the next kernel start once each program of this one has called this or has ended."""
    if is_early:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(is_early: tl.constexpr):
    """Wait until the kernel before has ended.

    Each program of a kernel with `early_launch` calls this. So when such a kernel has ended, all kernels before it have
    ended too.
    """
    if is_early:
        gdc_wait()


def norm_warps(dim: int) -> int:
    """Warps of every kernel that calls `store_norm`. Their number decides the order in which a row's squares are added, so two
    kernels have bit-identical norms of the same rows only with the same number of warps."""
    return 16 if dim >= 4096 else 4


@triton.jit
def plus_bias(x, bias, inside):
    """x + bias, added in float32 and rounded to x's type. bias: pointers, of which those `inside` are read."""
    return (x.to(tl.float32) + tl.load(bias, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)


@triton.jit
def store_norm(out, x, weight, inside, dim, eps):
    """Store the RMSNorm of one row to `out`. weight: the norm's, loaded."""
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / dim + eps)).to(x.dtype)
    tl.store(out, (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype), mask=inside)


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
