"""What several kernels do: programmatic dependent launch, and with a row or a tile the same rounding, to the model's dtype after
each operation.

A kernel of a step depends on the one before. With programmatic dependent launch (CUDA, sm_90 and later) its programs start while
the last ones of that kernel run, and wait for its results (`wait_for_inputs`). This hides the launch, and what a kernel does
before it waits.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

_LEAST_SM = 90  # that has programmatic dependent launch


@cache
def dependent_launch() -> dict[str, bool]:
    """Options of a launch whose kernel calls `wait_for_inputs` before it reads or writes what another kernel of a step does."""
    try:
        target = driver.active.get_current_target()
    except RuntimeError:  # Triton's interpreter has no device
        return {"is_dependent": False}
    if target.backend != "cuda" or target.arch < _LEAST_SM:
        return {"is_dependent": False}
    return {"is_dependent": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(is_dependent: tl.constexpr):
    """The kernel after this one may start at once, since it waits in turn; this one waits for the end of the one before."""
    if is_dependent:
        gdc_launch_dependents()
        gdc_wait()


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
