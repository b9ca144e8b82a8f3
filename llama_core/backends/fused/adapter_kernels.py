"""The products of LoRA adapters in Triton: scale * A x of each token, then B of it, added to the product of the base.

Each token reads its adapter's matrices by its place, so one launch serves any adapters, and a CUDA graph any step. A token's
sums have one order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from typing import Final

import torch
import triton
import triton.language as tl

from llama_core.backends.fused.adapters import Adapted

_INPUTS: Final = 256  # that a program reads at a time
_RANKS: Final = 8  # of A that a program computes
_OUTPUTS: Final = 128  # that a program computes


@triton.jit
def _shrink(x, a, scales, places, out, inputs, rank, modules: tl.constexpr, ranks: tl.constexpr, block: tl.constexpr):
    """scale * A x of one token, for some rows of one weight's A: out float32 [T, modules, rank]."""
    token, module = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.program_id(2) * ranks + tl.arange(0, ranks)
    place = tl.load(places + token) - 1
    if place >= 0:
        pair = place * modules + module
        column = tl.arange(0, block)
        total = tl.zeros((ranks, block), dtype=tl.float32)
        for begin in range(0, inputs, block):
            at = begin + column
            values = tl.load(x + token * inputs + at, mask=at < inputs, other=0.0).to(tl.float32)
            inside = (row < rank)[:, None] & (at < inputs)[None, :]
            weights = tl.load(a + (pair * rank + row)[:, None] * inputs + at[None, :], mask=inside, other=0.0)
            total += weights.to(tl.float32) * values[None, :]
        sums = tl.sum(total, axis=1) * tl.load(scales + pair)
        tl.store(out + (token * modules + module) * rank + row, sums, mask=row < rank)


@triton.jit
def _expand(
    y, shrunk, b, places, outputs, second, third, rank, modules: tl.constexpr, ranks: tl.constexpr, block: tl.constexpr
):
    """Add B of one token's `shrunk` to some of its outputs. second, third: the first outputs of these weights."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    place = tl.load(places + token) - 1
    if place >= 0:
        module = (at >= second).to(tl.int32) + (at >= third).to(tl.int32)
        column = tl.arange(0, ranks)
        inside = (at < outputs)[:, None] & (column < rank)[None, :]
        weights = tl.load(b + (place * outputs + at)[:, None] * rank + column[None, :], mask=inside, other=0.0)
        values = tl.load(shrunk + (token * modules + module)[:, None] * rank + column[None, :], mask=inside, other=0.0)
        delta = tl.sum(weights.to(tl.float32) * values, axis=1)
        old = tl.load(y + token * outputs + at, mask=at < outputs, other=0.0)
        tl.store(y + token * outputs + at, (old.to(tl.float32) + delta).to(old.dtype), mask=at < outputs)


def add_adapters(y: torch.Tensor, x: torch.Tensor, adapted: Adapted) -> None:
    """As `MatrixAdapters.add_to`."""
    (a, b, scales, bounds), places = (*adapted.adapters.tensors, adapted.adapters.bounds), adapted.places
    (count, inputs), outputs, modules, rank = x.shape, y.shape[1], a.shape[1], a.shape[2]
    shrunk = torch.empty((count, modules, rank), dtype=torch.float32, device=x.device)
    ranks = triton.next_power_of_2(rank)
    some = min(_RANKS, ranks)
    _shrink[(count, modules, triton.cdiv(rank, some))](
        x, a, scales, places, shrunk, inputs, rank, modules=modules, ranks=some, block=_INPUTS
    )
    second, third = (*bounds[1:-1], outputs, outputs)[:2]
    _expand[(count, triton.cdiv(outputs, _OUTPUTS))](
        y, shrunk, b, places, outputs, second, third, rank, modules=modules, ranks=ranks, block=_OUTPUTS
    )
