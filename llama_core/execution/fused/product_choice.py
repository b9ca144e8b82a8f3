"""Decides which products run in a kernel of our own (`product_kernels.py`). cuBLAS computes the others."""

from collections.abc import Callable
from typing import Final

import torch

from llama_core.execution.weight_formats.format import HeldWeights

# Rows of a product that reading the weights limits on every GPU of sm_80 and later. More rows go to cuBLAS.
MOST_ROWS: Final = 64
# (weights, rows) -> whether the product is ours. Nothing else decides, so that a step computes the same in a graph and outside.
Fuses = Callable[[HeldWeights, int], bool]


def never(weights: HeldWeights, rows: int) -> bool:
    """No product: all are cuBLAS's."""
    return False


def always(weights: HeldWeights, rows: int) -> bool:
    """Every product of at most MOST_ROWS rows, in any format of the weights."""
    return rows <= MOST_ROWS


def of_few_rows(weights: HeldWeights, rows: int) -> bool:
    """Products of at most MOST_ROWS rows, whose time is that of reading the weights: in bfloat16, our kernels are about as
    fast as cuBLAS or faster on an H100 and an H200, and save kernels. Not in float32, which uses no tensor cores: there
    the arithmetic of many rows takes the time."""
    return rows <= MOST_ROWS and weights.codes.dtype != torch.float32
