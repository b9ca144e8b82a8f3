"""Whether a product runs in a kernel with an epilogue (`product_kernels.py`), or a kernel of its own before the next one."""

from collections.abc import Callable
from typing import Final

import torch

from llama_core.execution.weight_formats.format import HeldWeights
from llama_core.step_time.devices import BANDWIDTH_SHARE
from llama_core.step_time.fused_products import MOST_ROWS, is_shorter, residual_bytes, swiglu_bytes

# (weights, rows, whether the epilogue is SwiGLU) -> whether the product is fused. Nothing else decides, so that a step computes
# the same in a graph and outside.
Fuses = Callable[[HeldWeights, int, bool], bool]


def never(weights: HeldWeights, rows: int, is_swiglu: bool) -> bool:
    return False


def always(weights: HeldWeights, rows: int, is_swiglu: bool) -> bool:
    return rows <= MOST_ROWS


class Estimated:
    """Where the model of a step's time says that it takes less time."""

    def __init__(self, bandwidth: float) -> None:
        """bandwidth: of the device's memory, bytes a second; 0 if unknown, and then the library multiplies all weights in the
        model's dtype."""
        self.bandwidth: Final = bandwidth
        self._read_rate: Final = bandwidth * BANDWIDTH_SHARE

    def __call__(self, weights: HeldWeights, rows: int, is_swiglu: bool) -> bool:
        is_quantized, itemsize = weights.scales is not None, weights.codes.itemsize
        # float32 products use no tensor cores: many rows are limited by their operations.
        if rows > MOST_ROWS or weights.codes.dtype == torch.float32 or (not is_quantized and not self._read_rate):
            return False
        return True
        outputs = len(weights.codes)
        saved = swiglu_bytes(rows, outputs // 2, itemsize) if is_swiglu else residual_bytes(rows, outputs, itemsize)
        return is_shorter(
            weights.nbytes, self._read_rate, saved_launches=is_swiglu, saved_bytes=saved, is_quantized=is_quantized
        )


def choice_for(device: torch.device) -> Estimated:
    """`Estimated` with the bandwidth that the driver reports, which older versions of torch do not give."""
    properties = torch.cuda.get_device_properties(device)
    kilohertz, bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    # Each cycle has two transfers of the whole bus.
    return Estimated(2e3 * kilohertz * bits / 8)
