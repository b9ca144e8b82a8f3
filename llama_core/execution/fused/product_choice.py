"""Which products run in a kernel of our own (`product_kernels.py`), the others in the library's."""

from collections.abc import Callable

import torch

from llama_core.execution.weight_formats.format import HeldWeights
from llama_core.step_time.fused_products import MOST_ROWS

# (weights, rows) -> whether the product is ours. Nothing else decides, so that a step computes the same in a graph and outside.
Fuses = Callable[[HeldWeights, int], bool]


def never(weights: HeldWeights, rows: int) -> bool:
    return False


def always(weights: HeldWeights, rows: int) -> bool:
    return rows <= MOST_ROWS


def of_few_rows(weights: HeldWeights, rows: int) -> bool:
    """Where reading the weights takes the time. For 1 and 64 rows of Llama 2 7B in bfloat16 these kernels are as fast as cuBLAS
    or faster on an H100. Products of float32 use no tensor cores: many rows are limited by their operations."""
    return rows <= MOST_ROWS and weights.codes.dtype != torch.float32
