"""What the device reaches at best: reading, products of the model's shapes, and the time between two kernels of a graph."""

import torch

from benchmarks.gpu.clock import Clock, clock_of, product_tflop_s, read_gb_s
from benchmarks.gpu.engine import model_of
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings

_KERNELS = 200


def run(record: Recorder, settings: Settings) -> None:
    clock, sizes, model = clock_of(settings.device), settings.sizes, model_of(settings)
    dtype = getattr(torch, settings.dtype)
    num_bytes = min(sizes.probe_bytes, int(clock.free_bytes() * 0.5))
    record.measure("read_gb_s", lambda: read_gb_s(clock, num_bytes, sizes.repeats))
    size = sizes.product_size
    record.measure("product_tflop_s", lambda: product_tflop_s(clock, size, size, size, dtype, sizes.repeats))
    shape = sizes.prompt, 2 * model.hidden_dim, model.dim
    record.measure("prompt_product_tflop_s", lambda: product_tflop_s(clock, *shape, dtype, sizes.repeats))
    if settings.device == "cuda":
        record.measure("us_between_kernels", lambda: us_between_kernels(clock))


def us_between_kernels(clock: Clock) -> float:
    """Of a graph of kernels that do next to nothing, each after the one before."""
    value = torch.zeros(1, device=clock.device)

    def kernels() -> None:
        for _ in range(_KERNELS):
            value.add_(1)

    return clock.milliseconds(clock.recorded(kernels), 20).median * 1e3 / _KERNELS
