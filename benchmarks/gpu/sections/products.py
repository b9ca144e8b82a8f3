"""Products of few rows both ways: SwiGLU and the residual in their epilogues, and in kernels of their own behind the library's.

`read_share` is the time of the library's product alone beside the fused one's: `product_kernels.of_few_rows` takes the fused
kernel for few rows, where it is near 1 or above.
"""

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import torch

from benchmarks.gpu.clock import Clock, clock_of, read_gb_s
from benchmarks.gpu.engine import model_of
from benchmarks.gpu.every_kernel import always
from benchmarks.gpu.recorder import Recorder, median
from benchmarks.gpu.settings import Settings
from llama_core.execution.fused.ops import TorchOps
from llama_core.execution.fused.product_kernels import Fuses, never, of_few_rows
from llama_core.execution.weight_formats.format import TorchMatrix
from llama_core.execution.weight_formats.matrices import find_weight_format

QUANTIZED: Final = ("int8", "int4")
_COLD_BYTES: Final = 2**28  # of matrices in turn, which no cache holds
_COLD_BYTES_TINY: Final = 2**16


class _Case(NamedTuple):
    rows: int
    inputs: int
    is_swiglu: bool
    dtype: torch.dtype
    repeats: int


def run(record: Recorder, settings: Settings) -> None:
    sizes, model, clock = settings.sizes, model_of(settings), clock_of(settings.device)
    num_bytes = min(sizes.probe_bytes, int(clock.free_bytes() * 0.5))
    record.measure("read_gb_s", lambda: read_gb_s(clock, num_bytes, sizes.repeats))
    matrices = {
        "gate_up": (2 * model.hidden_dim, model.dim),
        "out": (model.dim, model.query_width),
        "down": (model.dim, model.hidden_dim),
    }
    for name in (settings.dtype, *QUANTIZED):
        for matrix, (outputs, inputs) in matrices.items():
            wanted = {rows: f"{name}_{matrix}_{rows}_rows" for rows in sizes.rows}
            if record.has(*wanted.values()):
                continue
            copies = _copies(clock, settings, name, outputs, inputs)
            bandwidth = median(record.figures["read_gb_s"])
            for rows, figure in wanted.items():
                case = _Case(rows, inputs, matrix == "gate_up", getattr(torch, settings.dtype), sizes.repeats)
                record.measure(figure, partial(_both, clock, case, copies, bandwidth))
            del copies
            clock.free_bytes()


def _copies(clock: Clock, settings: Settings, name: str, outputs: int, inputs: int) -> list[TorchMatrix]:
    make, dtype = find_weight_format(name).torch_matrix, getattr(torch, settings.dtype)
    weight = (torch.randn(outputs, inputs, device=clock.device) * inputs**-0.5).to(dtype)
    found: list[TorchMatrix] = []
    wanted = _COLD_BYTES_TINY if settings.is_tiny else _COLD_BYTES
    while sum(each.held.nbytes for each in found) < wanted:
        matrix = make(outputs, inputs, dtype, clock.device)
        matrix.set_rows(0, weight)
        found.append(matrix)
    return found


def _both(clock: Clock, case: _Case, matrices: list[TorchMatrix], bandwidth: float) -> dict[str, object]:
    """us of one product with what follows. product_us: of the product alone, whose time the fused one's is compared with."""
    rows, inputs, is_swiglu, dtype, repeats = case
    held, device = matrices[0].held, clock.device
    outputs = len(held.codes)
    x = torch.randn(rows, inputs, device=device).to(dtype)
    states, norm = (torch.randn(size, device=device).to(dtype) for size in ((rows, outputs), (outputs,)))

    def work(fuses: Fuses) -> Callable[[TorchMatrix], object]:
        ops = _ops(device, fuses)
        if is_swiglu:
            return partial(ops.gated_product, x)
        return lambda matrix: ops.add_product_norm(states, x, matrix, norm, 1e-5)

    fused, separate, product = (
        _us(clock, each, matrices, repeats) for each in (work(always), work(never), lambda matrix: matrix.multiply(x))
    )
    reached = held.nbytes / fused / 1e3
    is_fused = device.type == "cuda" and of_few_rows(held, rows)
    return {
        "fused_us": fused,
        "separate_us": separate,
        "product_us": product,
        "read_share": product / fused,
        "fused_gb_s": reached,
        "share_of_bandwidth": reached / bandwidth,
        "chosen": "fused" if is_fused else "separate",
    }


def _ops(device: torch.device, fuses: Fuses) -> TorchOps:
    if device.type != "cuda":
        return TorchOps()
    from llama_core.execution.fused.kernels import TritonOps

    return TritonOps(fuses=fuses)


def _us(clock: Clock, work: Callable[[TorchMatrix], object], matrices: list[TorchMatrix], repeats: int) -> float:
    """Of one of the products, in a graph of all: the host's launches would take longer."""

    def all_of_them() -> None:
        for matrix in matrices:
            work(matrix)

    with torch.inference_mode():
        return clock.milliseconds(clock.recorded(all_of_them), repeats).median * 1e3 / len(matrices)
