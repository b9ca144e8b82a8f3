"""Differences of the Triton kernels from torch, on a GPU or in Triton's interpreter. Needs torch and Triton alone."""

from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F

from llama_core.backends.fused.ops import HeadChanges, HeadNorms, RowNorm, SlotTokens, TorchOps
from llama_core.backends.fused.step_plan import AttentionTiles, SampleTensors, StepTensors
from llama_core.backends.kv_cache import FLOAT8_BYTES, KVCache, cached_as
from llama_core.backends.rotary import rotary_table
from llama_core.backends.weight_formats.matrices import QuantizedMatrix, find_weight_format
from llama_core.model.operations import Activation, Angles, Temperature
from llama_core.model.rope import RopeConfig

# (query heads, key heads, head_dim, tokens of a block)
SHAPES = ((4, 4, 16, 16), (6, 2, 24, 16), (8, 1, 64, 32), (2, 1, 128, 16), (2, 1, 256, 16))
GROUPED = ("int8_groups", "int4", "int4_min")
FORMATS = ("int8", "fp8", *GROUPED)


def check_copies(device: torch.device, dtype: torch.dtype) -> None:
    """The kernels that copy and store give what torch does, over several shapes."""
    from llama_core.backends.fused.kernels import TritonOps

    kernels, meaning = TritonOps(), TorchOps()
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    for n_heads, n_kv_heads, head_dim, block_size in SHAPES:
        count, dim = 5, n_heads * head_dim
        slots, places = torch.tensor([[2, 0, 1, 2, 0], [3, 0, 95, 64, 47]], device=device)
        tokens = torch.randperm(3 * 96, generator=generator).view(3, 96).to(device)
        tables, none = torch.arange(72).view(3, 24), AttentionTiles(slots[:0], slots[:0])
        for columns in (dim, 1365):  # a third of 4,096, of a rank among three
            known = SlotTokens(tokens, tables.flip(0, 1).to(device))
            inputs = StepTensors(slots, places, none), known, block_size, random(3 * 96, columns)
            assert all(map(torch.equal, kernels.embed(*inputs), meaning.embed(*inputs)))
        for many in (1, 5, 300):
            sampled = torch.randint(-2, 500, (many,), generator=generator).to(device)
            at = torch.arange(many, device=device)
            stored = [torch.zeros(many, 9 + many, dtype=torch.int64, device=device) for _ in range(2)]
            results = [torch.zeros(many, dtype=torch.int64, device=device) for _ in range(2)]
            samples = SampleTensors(at, at, at + 7)
            kernels.store_samples(sampled, samples, stored[0], results[0])
            meaning.store_samples(sampled, samples, stored[1], results[1])
            assert torch.equal(*stored) and torch.equal(*results)
        table = rotary_table(Angles(RopeConfig()), head_dim, 400, device)
        qkv = random(count, n_heads + 2 * n_kv_heads, head_dim)
        positions, write = torch.tensor([[0, 3, 77, 150, 299], [5, 17, 40, 99, 3]], device=device)
        cache = [torch.zeros(40, block_size, n_kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2)]
        # Subnormals, ties, the border to normal values, and values beyond the largest.
        size = qkv.numel()
        spread = torch.cat(
            [torch.arange(size // 2) / 1024 - 2.0, torch.randn(size - size // 2, generator=generator) * 300]
        )
        wide = spread.view(qkv.shape).to(device, dtype)
        floats = KVCache(*(torch.zeros(cache[0].shape, dtype=FLOAT8_BYTES, device=device) for _ in range(2)))
        plain, changes = KVCache(*map(torch.zeros_like, cache)), HeadChanges(q_table=table, k_table=table)
        kernels.rotate_and_store(wide.clone(), changes, positions, write, floats)
        kernels.rotate_and_store(wide.clone(), changes, positions, write, plain)
        assert all(torch.equal(floats[i], cached_as(FLOAT8_BYTES, plain[i])) for i in range(2))


def check_adapters(device: torch.device) -> None:
    """The kernels of adapters beside torch: sums, rows without an adapter, and bits that depend on the row alone."""
    from llama_core.backends.fused.adapter_kernels import add_adapters
    from llama_core.backends.fused.adapters import Adapted, MatrixAdapters

    generator = torch.Generator().manual_seed(0)
    for inputs, bounds, rank in ((40, (0, 24, 32, 40), 3), (300, (0, 150, 300), 16), (16, (0, 130), 20)):
        modules, outputs = len(bounds) - 1, bounds[-1]
        shapes = (3, modules, rank, inputs), (3, outputs, rank), (3, modules), (7, outputs), (7, inputs)
        a, b, scales, y, x = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
        adapted = Adapted(MatrixAdapters(a, b, scales, bounds), torch.tensor([0, 3, 1, 1, 0, 2, 3], device=device))
        mine, theirs, single = y.clone(), y.clone(), y.clone()
        add_adapters(mine, x, adapted)
        adapted.adapters.add_to(theirs, x, adapted.places)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert torch.equal(mine[::4], y[::4]), "rows without an adapter stay as they are"
        for t in range(len(y)):
            add_adapters(single[t : t + 1], x[t : t + 1], Adapted(adapted.adapters, adapted.places[t : t + 1]))
        assert torch.equal(mine, single), "a row's bits depend on the row alone"


def check_beside_float64(device: torch.device, dtype: torch.dtype, seed: int) -> None:
    """Norms, rotation, SwiGLU and a quantized product of random shapes, beside what torch computes in float64."""
    from llama_core.backends.fused.kernels import TritonOps
    from llama_core.backends.weight_formats.kernels import multiply

    kernels, meaning = TritonOps(), TorchOps()
    share = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 0.03}[dtype]
    draw, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    count, width = (int(draw.integers(1, most)) for most in (6, 301))
    n_heads, n_kv_heads = draw.choice(((4, 4), (6, 2), (5, 1))).tolist()
    head_dim, inputs = int(draw.choice((8, 16, 20, 24, 66))), int(draw.integers(32, 102))
    name = FORMATS[seed % len(FORMATS)]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def agree(got: torch.Tensor, expected: torch.Tensor) -> None:
        error = (got.double() - expected).abs().max().item()
        assert error <= share * max(1.0, expected.abs().max().item()), (seed, error)

    states, delta, weight = random(count, width), random(count, width), 1 + 0.1 * random(width)
    # The norm is of the sum as it is stored.
    total = (states.double() + delta.double()).to(dtype).double()
    mine = states.clone()
    norm, wide_norm = RowNorm(weight, 1e-5), RowNorm(weight.double(), 1e-5)
    got = kernels.add_norm(mine, delta, norm)
    agree(mine, total)
    biased = states.clone()
    kernels.add_norm(biased, delta, norm, weight)
    agree(biased, states.double() + delta.double() + weight.double())
    agree(got, meaning.add_norm(total.clone(), None, wide_norm))
    gate_up, bias = random(count, 2 * width), random(2 * width)
    for activation in get_args(Activation):
        got = kernels.gate(gate_up, bias, activation)
        agree(got, meaning.gate(gate_up.double(), bias.double(), activation))
    k_table: torch.Tensor | None
    table = k_table = rotary_table(Angles(RopeConfig()), head_dim, 400, device)
    if seed % 2:
        k_table = rotary_table(Angles(RopeConfig(theta=100.0), Temperature(0.1, 50)), head_dim, 400, device)
    qkv = random(count, n_heads + 2 * n_kv_heads, head_dim)
    k_table = None if seed % 4 == 3 else k_table
    positions, places = (torch.randperm(most, generator=generator)[:count].to(device) for most in (400, 64))
    caches = KVCache(*(torch.zeros(4, 16, n_kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2)))
    wide = KVCache(*(cache.double() for cache in caches))
    norms = HeadNorms(random(head_dim), random(head_dim), 1e-5) if seed % 2 else None
    wide_norms = norms and HeadNorms(norms.q.double(), norms.k.double(), 1e-5)
    added = random(qkv[0].numel()) if seed % 3 else None
    q = kernels.rotate_and_store(qkv.clone(), HeadChanges(added, norms, table, k_table), positions, places, caches)
    wide_added = None if added is None else added.double()
    changes = HeadChanges(wide_added, wide_norms, table.double(), None if k_table is None else k_table.double())
    agree(q, meaning.rotate_and_store(qkv.double(), changes, positions, places, wide))
    for cache, expected in zip(caches, wide, strict=True):
        agree(cache, expected)
    matrix = matrix_of(name, torch.randn(width + 1, inputs, generator=generator).to(device), dtype)
    matrix._product = multiply
    x = random(count, inputs)
    agree(matrix.multiply(x), F.linear(x.double(), matrix.dequantized().to(dtype).double()))


def matrix_of(name: str, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> QuantizedMatrix:
    matrix: Any = find_weight_format(name).torch_matrix(len(weight), weight.shape[1], dtype, weight.device)
    half = len(weight) // 2
    matrix.set_rows(0, weight[:half])
    matrix.set_rows(half, weight[half:])
    return matrix  # type: ignore[no-any-return]
