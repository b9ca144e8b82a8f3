"""When a product of few rows takes less time in a kernel of our own, which also does what a further kernel would do.

Such a kernel saves a launch, and the traffic of a result that no further kernel reads. Whether it reads weights as fast as the
library's is not known, because no GPU has run it; `make gpu-bench` measures both ("products").
"""

from typing import Final

from llama_core.step_time.devices import LAUNCH_S

# Rows of a product that reading the weights limits on every GPU in `devices`. More rows go to the library.
MOST_ROWS: Final = 64
# Of the rate at which the library reads weights, what these kernels are assumed to reach: a margin, not a measurement.
ASSUMED_READ_SHARE: Final = 0.9


def is_shorter(
    weight_bytes: float, read_rate: float, *, saved_launches: int, saved_bytes: float, is_quantized: bool
) -> bool:
    """Whether the fused product of one matrix is estimated to take less time. read_rate: bytes a second, of the library's
    product. saved_bytes: that are neither written nor read again.

    Quantized weights have no product in the library, and read at the same rate either way.
    """
    if is_quantized:
        return True
    saved_s = saved_launches * LAUNCH_S + saved_bytes / read_rate
    return saved_s > fused_product_s(weight_bytes, read_rate, is_quantized=False) - weight_bytes / read_rate


def fused_product_s(weight_bytes: float, read_rate: float, *, is_quantized: bool) -> float:
    """Seconds of the fused product."""
    return weight_bytes / (read_rate * (1.0 if is_quantized else ASSUMED_READ_SHARE))


def swiglu_bytes(rows: int, hidden: int, itemsize: int) -> int:
    """That gate and up take between their product and SwiGLU: written once, read once."""
    return 2 * rows * 2 * hidden * itemsize


def residual_bytes(rows: int, dim: int, itemsize: int) -> int:
    """Of the product's output, which is written and read once, and of hidden states, which the norm then reads once more."""
    return (2 - 1) * rows * dim * itemsize
