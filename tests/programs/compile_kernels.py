"""Compiles every Triton kernel of the fused backend for GPUs, without one: `python -m tests.programs.compile_kernels`.

The product's own launches run on small CPU tensors behind a driver that compiles for `--sm` and launches nothing. So the
kernels are specialized as on a GPU. Exit status 1 if a kernel does not compile, or needs more shared memory than the GPU has.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import argparse
import os
import sys
import tempfile
from typing import Any

import torch

# Bytes of shared memory that one block may use, by compute capability (CUDA C Programming Guide).
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}


def fake_driver(compiled: list[tuple[str, int, int]]) -> Any:
    """A driver of Triton with the attribute `sm`. It appends (kernel, sm, bytes of shared memory) for each kernel."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Utils:
        def load_binary(self, name, kernel, shared, device):
            compiled.append((name, device, shared))
            return object(), 0, 0, 0, 1024

        def get_device_properties(self, device):
            return {"max_shared_mem": SHARED_MEMORY[device], "multiprocessor_count": 132, "warpSize": 32}

    class Launcher:
        def __init__(self, src, metadata):
            pass

        def __call__(self, *args, **kwargs):
            pass

    class Driver(DriverBase):
        launcher_cls = Launcher
        utils = Utils()
        sm = 80

        def __init__(self):
            pass

        @classmethod
        def is_active(cls):
            return True

        def get_current_device(self):
            return self.sm  # Triton caches kernels by device

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", self.sm, 32)

        def get_active_torch_device(self):
            return torch.device("cpu")

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_benchmarker(self):
            raise NotImplementedError

    return Driver()


def launch_layer(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int, rows: int) -> None:
    """Every kernel that a layer launches, with its biases and norms and without."""
    from llama_core.execution.fused.kernels import TritonOps
    from llama_core.execution.fused.ops import HeadNorms
    from llama_core.execution.fused.step_plan import TILE_COLUMNS, AttentionTiles

    def new(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=of)

    ops, dim, total = TritonOps(), heads * head_dim, heads + 2 * kv_heads
    keys, values = new(4, 16, kv_heads, head_dim), new(4, 16, kv_heads, head_dim)
    positions, table = new(rows, of=torch.int64), new(64, head_dim // 2, 2, of=torch.float32)
    ops.add_norm(new(rows, dim), None, new(dim), 1e-5)
    for bias in (None, new(dim)):
        ops.add_norm(new(rows, dim), new(rows, dim), new(dim), 1e-5, bias)
    for qkv_bias in (None, new(total * head_dim)):
        for norms in (None, HeadNorms(new(head_dim), new(head_dim), 1e-5)):
            qkv = new(rows, total, head_dim)
            q = ops.rotate_and_store(qkv, table, positions, positions, keys, values, qkv_bias, norms)
    for gate_bias in (None, new(4 * dim)):
        ops.gated_silu(new(rows, 4 * dim), gate_bias)
    tiles = new(rows, TILE_COLUMNS, of=torch.int64)
    tables = new(8, 64, of=torch.int64)
    ops.attend(q, keys, values, tables, AttentionTiles(tiles, tiles), 128, window)


def launch_products(dtype: torch.dtype, outputs: int, inputs: int, rows: int) -> None:
    """The product of each quantized format."""
    from llama_core.execution.weight_formats.kernels import multiply

    x, groups = torch.zeros((rows, inputs), dtype=dtype), inputs // 32
    codes = torch.zeros((outputs, inputs), dtype=torch.int8)
    packed = torch.zeros((outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.zeros((outputs, groups), dtype=torch.float16)
    multiply(x, codes, torch.zeros(outputs), None, is_packed=False)
    multiply(x, codes, scales, None, is_packed=False)
    multiply(x, packed, scales, None, is_packed=True)
    multiply(x, packed, scales, scales, is_packed=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sm", type=int, nargs="+", default=[80, 90], choices=SHARED_MEMORY)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 5, 64])
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        from triton.runtime import driver as drivers

        compiled: list[tuple[str, int, int]] = []
        driver = fake_driver(compiled)
        drivers.set_active(driver)
        for driver.sm in options.sm:
            for dtype in (getattr(torch, name) for name in options.dtype):
                for rows in options.rows:
                    launch_layer(dtype, 32, 8, 128, 0, rows)
                    launch_layer(dtype, 9, 3, 64, 4096, rows)
                    launch_products(dtype, 4096, 4096, rows)
    too_large = [found for found in compiled if found[2] > SHARED_MEMORY[found[1]]]
    for name, sm, shared in too_large:
        print(f"{name} needs {shared} bytes of shared memory on sm_{sm}, which has {SHARED_MEMORY[sm]}")
    kernels = sorted({name for name, _, _ in compiled})
    print(f"{len(compiled)} variants of {len(kernels)} kernels compiled for sm {options.sm}: {', '.join(kernels)}")
    sys.exit(bool(too_large))


if __name__ == "__main__":
    main()
