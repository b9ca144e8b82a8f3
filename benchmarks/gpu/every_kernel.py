"""Launches every Triton kernel of the engine on small tensors: `python -m benchmarks.gpu.every_kernel cuda|cpu [PART ...]`.

For compute-sanitizer on a GPU; on a CPU, TRITON_INTERPRET=1 must be set. Prints the kernels. Without parts all of them are
launched, and a kernel of the source that is not is an error: a new kernel has its place here.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.harness.common import REPOSITORY

CAPTURES: Final = "generate"  # the part that captures graphs


def always(weights: object, rows: int) -> bool:
    """A choice of `TritonOps`: every product of few rows in a kernel of ours, also in float32."""
    from llama_core.backends.fused.product_kernels import MOST_ROWS

    return rows <= MOST_ROWS


def kernels_in_source() -> set[str]:
    """The names of all functions under triton.jit in llama_core that are launched, with a grid, anywhere."""
    jitted, launched = set(), set()
    for path in sorted((REPOSITORY / "llama_core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                decorators = map(ast.unparse, node.decorator_list)
                jitted |= {node.name for each in decorators if each.startswith("triton.jit")}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value).rpartition(".")[2])
    return jitted & launched


@contextmanager
def recorded_launches() -> Iterator[set[str]]:
    """The names of the kernels that are launched inside."""
    from triton.runtime.jit import KernelInterface

    names: set[str] = set()
    before = KernelInterface.__getitem__

    def get(self: Any, grid: Any) -> Any:
        names.add(self.fn.__name__)
        return before(self, grid)

    KernelInterface.__getitem__ = get
    try:
        yield names
    finally:
        KernelInterface.__getitem__ = before


def parts(device: torch.device) -> dict[str, Callable[[], None]]:
    """Launches by name, which may run in processes of their own: most of their time, Triton compiles."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if device.type == "cuda" else (torch.float32,)
    launches = {
        "layer": launch_layer,
        "products": launch_products,
        "fused products": launch_fused_products,
    }
    found: dict[str, Callable[[], None]] = {
        f"{name}, {str(dtype).removeprefix('torch.')}": partial(launch, device, dtype)
        for dtype in dtypes
        for name, launch in launches.items()
    }
    return found | {"sampling": partial(launch_sampling, device), CAPTURES: partial(generate, device.type)}


def launch_layer(device: torch.device, dtype: torch.dtype) -> None:
    """A layer's kernels over decodes, drafts and chunks, with and without biases, norms and a window, and batch-invariant."""
    from benchmarks.gpu.sections.attention import attention_tiles
    from llama_core.backends.fused.kernels import TritonOps
    from llama_core.backends.fused.ops import HeadChanges, HeadNorms, RowNorm, SlotTokens
    from llama_core.backends.fused.step_memory import max_split_decode_tokens
    from llama_core.backends.fused.step_plan import (
        TILE_COLUMNS,
        AttentionTiles,
        SampleTensors,
        StepArrays,
        StepTensors,
        plan_of,
    )
    from llama_core.backends.kv_cache import FLOAT8_BYTES, KVCache, cached_as
    from llama_core.model.operations import Attend
    from llama_core.scheduling.step import Row

    n_heads, n_kv_heads, head_dim, block_size = 6, 2, 24, 4
    rows = [Row(0, 150, 1, True), Row(1, 20, 5, True, 4), Row(2, 3, 37, True), Row(3, 0, 18, False)]
    ops, invariant = TritonOps(), TritonOps(batch_invariant=True)
    plan = plan_of(rows, ops.tile_sizes(n_heads, n_kv_heads, head_dim, dtype))
    count, decodes, chunks = plan.shape

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(device, dtype)

    def ints(height: int, width: int) -> Any:
        return np.zeros((height, width), np.int64)

    sizes = (decodes + 2, TILE_COLUMNS), (chunks + 2, TILE_COLUMNS)
    arrays = StepArrays(ints(3, len(plan.sampled_slots)), ints(2, count), *(ints(*size) for size in sizes))
    plan.write(arrays, 0)
    slots, positions = (torch.from_numpy(part).to(device) for part in arrays.tokens)
    tables = torch.randperm(len(rows) * 40).view(len(rows), 40).to(device)
    mapping = tables[slots, positions // block_size] * block_size + positions % block_size
    cache = KVCache(*(new(tables.numel(), block_size, n_kv_heads, head_dim) for _ in range(2)))
    dim, hidden, heads = 40, 1100, n_heads + 2 * n_kv_heads
    states, weight, table = new(count, dim), new(dim), torch.randn(200, head_dim // 2, 2, device=device)
    norms, norm = HeadNorms(new(head_dim), new(head_dim), 1e-5), RowNorm(weight, 1e-5)
    for bias, some in ((None, None), (new(heads * head_dim), norms)):
        ops.add_norm(states, None if bias is None else new(count, dim), norm, None if bias is None else weight)
        qkv, changes = new(count, heads, head_dim), HeadChanges(bias, some, table, table)
        q = ops.rotate_and_store(qkv, changes, positions, mapping, cache)
        tiles = AttentionTiles(*(torch.from_numpy(part).to(device) for part in (arrays.decodes, arrays.chunks)))
        for window in (0, 40):
            ops.attend(q, cache, tables, tiles, Attend(window))
        invariant.attend(q, cache, tables, tiles, Attend())
        floats = KVCache(*(cached_as(FLOAT8_BYTES, each) for each in cache))
        ops.rotate_and_store(qkv, changes, positions, mapping, floats)
        ops.attend(q, floats, tables, tiles, Attend())
        ops.gate(new(count, 2 * hidden), None if bias is None else new(2 * hidden))
    # Enough decodes that one program computes all splits of each.
    many = [Row(0, 150 if row < 4 else 3, 1, True) for row in range(max_split_decode_tokens(n_kv_heads) + 1)]
    tiles = attention_tiles(many, ops.tile_sizes(n_heads, n_kv_heads, head_dim, dtype), device)
    ops.attend(new(len(many), n_heads, head_dim), cache, tables, tiles, Attend())
    tokens = torch.zeros((len(rows), 160), dtype=torch.int64, device=device)
    ops.embed(StepTensors(slots, positions, tiles), SlotTokens(tokens, tables), block_size, new(1, dim))
    ops.store_samples(slots, SampleTensors(slots, slots, positions), tokens, torch.zeros_like(slots))
    ops.add_time(torch.zeros(2, dtype=torch.int64, device=device), 1, -n_heads)


def launch_products(device: torch.device, dtype: torch.dtype) -> None:
    """The product of each quantized format, for one row, a few and many, and batch-invariant ones with and without splits."""
    from llama_core.backends.weight_formats.format import HeldWeights
    from llama_core.backends.weight_formats.invariant_kernels import multiply_in_order
    from llama_core.backends.weight_formats.kernels import multiply

    outputs, inputs = 48, 96
    codes = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, device=device)
    packed = torch.randint(0, 255, (outputs, inputs // 2), dtype=torch.uint8, device=device)
    scales = torch.rand(outputs, inputs // 32, dtype=torch.float16, device=device)
    for rows in (1, 5, 64):
        x = torch.randn(rows, inputs).to(device, dtype)
        multiply(x, HeldWeights(codes, torch.rand(outputs, device=device)))
        multiply(x, HeldWeights(codes, scales))
        multiply(x, HeldWeights(codes.view(torch.uint8), torch.rand(outputs, device=device)))  # float8
        multiply(x, HeldWeights(packed, scales, None, True))
        multiply(x, HeldWeights(packed, scales, scales, True))
        wide = torch.randn(rows + 1, 1030).to(device, dtype)
        multiply_in_order(wide, torch.randn(outputs, 1030).to(device, dtype))


def launch_fused_products(device: torch.device, dtype: torch.dtype) -> None:
    """Products with epilogues in each format, for a tile of each number of rows, of odd sizes, with splits and without."""
    from llama_core.backends.fused.kernels import TritonOps
    from llama_core.backends.fused.ops import RowNorm
    from llama_core.backends.weight_formats.matrices import find_weight_format
    from llama_core.model.weight_formats import QUANTIZED

    ops = TritonOps(fuses=always)
    for name in (str(dtype).removeprefix("torch."), *QUANTIZED):
        make = find_weight_format(name).torch_matrix
        for rows, inputs, hidden in ((1, 75, 17), (20, 1030, 8), (63, 75, 33)):
            x, states = torch.randn(rows, inputs).to(device, dtype), torch.randn(rows, hidden).to(device, dtype)
            up, down = (make(outputs, inputs, dtype, device) for outputs in (2 * hidden, hidden))
            for matrix, outputs in ((up, 2 * hidden), (down, hidden)):
                matrix.set_rows(0, torch.randn(outputs, inputs).to(device, dtype))
            weight = torch.randn(hidden).to(device, dtype)
            norm = RowNorm(weight, 1e-5)
            for bias in (None, torch.randn(2 * hidden).to(device, dtype))[: 1 + (rows == 1)]:
                ops.gated_product(x, up, bias)
                ops.add_product_norm(states, x, down, norm, None if bias is None else weight)


def launch_sampling(device: torch.device) -> None:
    """Every way to sample, and logprobs, over a vocabulary of several chunks."""
    from typing import get_args

    from llama_core.backends import logit_rules
    from llama_core.backends.fused.kernels import TritonSampler
    from llama_core.backends.fused.sampling.sampler import Mode, SamplingState
    from llama_core.backends.fused.step_plan import SampleTensors
    from llama_core.backends.sampling_tensors import SlotSamplingArray

    rows, slots, vocab = 3, 4, 5000
    index = torch.arange(rows, device=device)
    state = SamplingState(
        torch.zeros((slots, 64), dtype=torch.int64, device=device),
        SlotSamplingArray(slots, device),
        torch.zeros((slots, logit_rules.table_words(vocab)), dtype=torch.int64, device=device),
        index,
        torch.zeros((rows, logit_rules.bit_words(vocab)), dtype=torch.int64, device=device),
    )
    sampler, logits = TritonSampler(state, rows, vocab), torch.randn(rows, vocab).to(device)
    for mode in get_args(Mode):
        sampler.sample(logits.clone(), SampleTensors(index, index, index), mode)
    sampler.logprobs(logits, index)


def generate(device: str) -> None:
    """Steps of a tiny model on the device: prompts and decodes, greedy and sampled, in graphs on a GPU."""
    from benchmarks.gpu.engine import open_engine
    from benchmarks.gpu.sections.invariance import texts
    from benchmarks.gpu.settings import Settings

    settings = Settings(device, "tiny", "float16" if device == "cuda" else "float32", vocab_size=300, is_tiny=True)
    texts(open_engine(settings, settings.sizes.context, 4), settings, range(4))


def main() -> None:
    device, wanted = torch.device(sys.argv[1]), sys.argv[2:]
    by_name = parts(device)
    with recorded_launches() as names:
        for part in wanted or by_name:
            by_name[part]()
        if device.type == "cuda":
            torch.cuda.synchronize()
    for name in sorted(names):
        print(f"kernel {name}")
    if not wanted and (missing := kernels_in_source() - names):
        sys.exit(f"{Path(__file__).name} launches no {', '.join(sorted(missing))}")


if __name__ == "__main__":
    main()
