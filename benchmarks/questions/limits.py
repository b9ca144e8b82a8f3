"""The best that this machine can do: reading memory (the limit of decode) and matrix products (the limit of prefill).

    python -m benchmarks limits

Bandwidth is measured for buffers of several sizes, because a model that fits into a processor's last cache is read faster than
memory, and again after the matrix products, because it may change on a shared machine.
"""

import time
from collections.abc import Sequence

import torch

from benchmarks.harness.bandwidth import Bandwidth, BandwidthProbe, beyond_caches, probe_bandwidth
from benchmarks.harness.common import Cell, Spread, emit, print_table
from benchmarks.harness.options import question_parser

__all__ = ["main", "matmul_gflops", "probe_bandwidth"]

MIB = 2**20
FIRST_SIZE = 512  # rows and columns
SLOW_GFLOP_S = 5.0


def matmul_gflops(dtype: torch.dtype, size: int, passes: int) -> Spread | None:
    """10^9 operations a second of one product of two square matrices with `size` rows, on as many threads as torch has.

    None where torch has no fast kernel of that dtype for this CPU: without AVX-512, a product of 2048^3 in bfloat16 takes half
    a minute.
    """
    if dtype != torch.float32 and 2 * FIRST_SIZE**3 / min(product_seconds(dtype, FIRST_SIZE, 3)) < SLOW_GFLOP_S * 1e9:
        return None
    return Spread.of(2 * size**3 / each / 1e9 for each in product_seconds(dtype, size, passes))


def product_seconds(dtype: torch.dtype, size: int, passes: int) -> list[float]:
    """Of each pass but the first, which builds the kernel."""
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    seconds = []
    for _ in range(passes + 1):
        begin = time.perf_counter()
        torch.matmul(left, right)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def bandwidths(threads: Sequence[int], sizes: Sequence[int], passes: int) -> list[Bandwidth]:
    """One measurement for each number of threads and each size in bytes."""
    found = []
    for count in threads:
        for size in sizes:
            with BandwidthProbe(count, size) as probe:
                found.append(probe.measure(passes))
    return found


def main(argv: Sequence[str]) -> None:
    parser = question_parser("limits", __doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="the most that may be used")
    parser.add_argument("--buffer-mib", type=int, nargs="+", help="sizes of the buffers; the largest gives the limit")
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of the matrices")
    parser.add_argument("--passes", type=int, default=30)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    sizes = sorted(mib * MIB for mib in options.buffer_mib or (64, 256, beyond_caches() // MIB))
    threads = sorted({1, options.threads})

    before = bandwidths(threads, sizes, options.passes)
    products = {
        str(dtype).removeprefix("torch."): matmul_gflops(dtype, options.size, options.passes)
        for dtype in (torch.bfloat16, torch.float32)
    }
    after = bandwidths(threads, sizes, options.passes)

    rows: list[tuple[Cell | Spread, ...]] = [
        (f"{one.threads} thread{'s' * (one.threads > 1)}, {one.buffer_bytes // MIB} MiB", one.gb_s, two.gb_s)
        for one, two in zip(before, after, strict=True)
    ]
    print_table("Read bandwidth, GB/s", ["buffer", "before", "after"], rows)
    print_table(
        f"Matrix product {options.size}^3 on {options.threads} threads, GFLOP/s",
        ["dtype", "median"],
        products.items(),
    )
    emit(
        "limits",
        {"threads": options.threads, "bandwidth": before, "bandwidth_after": after, "matmul_gflop_s": products},
        options,
    )
