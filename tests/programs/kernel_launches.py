"""Launches every Triton kernel on CPU tensors of a family's shapes, for `kernel_compiler`, which compiles and runs nothing."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from llama_core.backends.weight_formats.format import HeldWeights


class Shape(NamedTuple):
    """What compile keys depend on."""

    heads: int
    kv_heads: int
    head_dim: int
    dim: int
    hidden: int
    window: int = 0
    has_biases: bool = False
    has_norms: bool = False

    def on(self, num_ranks: int) -> "Shape":
        return self._replace(
            heads=self.heads // num_ranks, kv_heads=max(1, self.kv_heads // num_ranks), hidden=self.hidden // num_ranks
        )


FAMILIES: Final = {
    "Llama 2 7B": Shape(32, 32, 128, 4096, 11008),
    "Llama 2 13B": Shape(40, 40, 128, 5120, 13824),
    "Llama 2 70B": Shape(64, 8, 128, 8192, 28672),
    "Code Llama 34B": Shape(64, 8, 128, 8192, 22016),
    "Llama 3 8B": Shape(32, 8, 128, 4096, 14336),
    "Llama 3.2 1B": Shape(32, 8, 64, 2048, 8192),
    "Llama 3.2 3B": Shape(24, 8, 128, 3072, 8192),
    "TinyLlama": Shape(32, 4, 64, 2048, 5632),
    "SmolLM2 135M": Shape(9, 3, 64, 576, 1536),
    "Mistral 7B": Shape(32, 8, 128, 4096, 14336, window=4096),
    "Mistral Nemo": Shape(32, 8, 128, 5120, 14336),
    "Qwen2.5 0.5B": Shape(14, 2, 64, 896, 4864, has_biases=True),
    "Qwen2.5 7B": Shape(28, 4, 128, 3584, 18944, has_biases=True),
    "Qwen3 8B": Shape(32, 8, 128, 4096, 12288, has_norms=True),
    "heads of 96": Shape(32, 32, 96, 3072, 8192),
    "heads of 256": Shape(16, 8, 256, 2048, 8192),
}


def launch_layer(shape: Shape, dtype: torch.dtype, block_size: int, *, in_all_modes: bool) -> None:
    """Every kernel that a layer launches between its products, in a step of decodes and of chunks."""
    from llama_core.backends.fused.adapters import Adapted, MatrixAdapters
    from llama_core.backends.fused.kernels import TritonOps
    from llama_core.backends.fused.ops import HeadChanges, HeadNorms, RowNorm, SlotTokens
    from llama_core.backends.fused.step_memory import max_split_decode_tokens
    from llama_core.backends.fused.step_plan import TILE_COLUMNS, AttentionTiles, SampleTensors, StepTensors
    from llama_core.backends.kv_cache import FLOAT8_BYTES, KVCache
    from llama_core.model.operations import Attend

    def new(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(sizes, dtype=of)

    ops, rows, total = TritonOps(), 2, shape.heads + 2 * shape.kv_heads
    cache = KVCache(*(new(2, block_size, shape.kv_heads, shape.head_dim) for _ in range(2)))
    positions, table = new(rows, of=torch.int64), new(64, shape.head_dim // 2, 2, of=torch.float32)
    weight = new(shape.dim)
    norm = RowNorm(weight, 1e-5)
    ops.add_norm(new(rows, shape.dim), None, norm)
    ops.add_norm(new(rows, shape.dim), new(rows, shape.dim), norm)
    qkv_bias = gate_bias = norms = None
    if shape.has_biases:
        qkv_bias, gate_bias = new(total * shape.head_dim), new(2 * shape.hidden)
        ops.add_norm(new(rows, shape.dim), new(rows, shape.dim), norm, weight)
    if shape.has_norms:
        norms = HeadNorms(new(shape.head_dim), new(shape.head_dim), 1e-5)
    changes = HeadChanges(qkv_bias, norms, table, table)
    q = ops.rotate_and_store(new(rows, total, shape.head_dim), changes, positions, positions, cache)
    ops.gate(new(rows, 2 * shape.hidden), gate_bias)
    widths = shape.heads * shape.head_dim, (shape.heads + shape.kv_heads) * shape.head_dim, total * shape.head_dim
    adapters = MatrixAdapters(
        new(1, 3, 16, shape.dim), new(1, widths[2], 16), new(1, 3, of=torch.float32), (0, *widths)
    )
    ops.add_adapters(new(rows, widths[2]), new(rows, shape.dim), Adapted(adapters, new(rows, of=torch.int64)))
    ops.add_time(new(2, of=torch.int64), 1, -shape.heads)
    index = new(rows, of=torch.int64)
    tokens = new(rows, 4096, of=torch.int64)
    tiles = new(rows, TILE_COLUMNS, of=torch.int64)
    both = AttentionTiles(tiles, tiles)
    ops.embed(StepTensors(index, index, both), SlotTokens(tokens, tokens), block_size, new(rows, shape.dim))
    ops.store_samples(index, SampleTensors(index, index, index), tokens, index)
    tables = new(8, 4096 // block_size, of=torch.int64)
    step = both, Attend(shape.window)
    ops.attend(q, cache, tables, *step)
    # Enough decodes that one program computes all splits of each.
    large = max_split_decode_tokens(shape.kv_heads) + 1
    many = AttentionTiles(new(large, TILE_COLUMNS, of=torch.int64), tiles[:0]), Attend(shape.window)
    queries = new(large, total, shape.head_dim)[:, : shape.heads]
    ops.attend(queries, cache, tables, *many)
    if in_all_modes:
        invariant = TritonOps(batch_invariant=True)
        invariant.attend(q, cache, tables, *step)
        invariant.attend(queries, cache, tables, *many)
        floats = KVCache(*(new(*cache.keys.shape, of=FLOAT8_BYTES) for _ in range(2)))
        ops.attend(q, floats, tables, *step)
        ops.attend(queries, floats, tables, *many)
        ops.rotate_and_store(new(rows, total, shape.head_dim), changes, positions, positions, floats)


def launch_products(dtype: torch.dtype, row_counts: Seq[int]) -> None:
    """The product of each quantized format, for each number of rows, and batch-invariant products."""
    from llama_core.backends.weight_formats.format import HeldWeights
    from llama_core.backends.weight_formats.invariant_kernels import multiply_in_order
    from llama_core.backends.weight_formats.kernels import multiply

    outputs = inputs = 256
    codes = torch.zeros((outputs, inputs), dtype=torch.int8)
    packed = torch.zeros((outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.zeros((outputs, inputs // 32), dtype=torch.float16)
    for rows in row_counts:
        x = torch.zeros((rows, inputs), dtype=dtype)
        multiply(x, HeldWeights(codes, torch.zeros(outputs)))
        multiply(x, HeldWeights(codes, scales))
        multiply(x, HeldWeights(codes.view(torch.uint8), torch.zeros(outputs)))  # float8
        multiply(x, HeldWeights(packed, scales, None, True))
        multiply(x, HeldWeights(packed, scales, scales, True))
    # Two splits, and numbers of rows in one tile and in two.
    weight = torch.zeros((outputs, 1024), dtype=dtype)
    for rows in (16, 128):
        multiply_in_order(torch.zeros((rows, 1024), dtype=dtype), weight)
        # The tiles that `batch_invariant` takes for few rows are those of many.
        multiply(
            torch.zeros((rows, inputs), dtype=dtype), HeldWeights(packed, scales, None, True), batch_invariant=True
        )


def launch_fused_products(shape: Shape, dtype: torch.dtype, formats: Seq[str], row_counts: Seq[int]) -> None:
    """Products with SwiGLU and the addition to hidden states in their epilogues, for each number of rows."""
    from llama_core.backends.fused.kernels import TritonOps
    from llama_core.backends.fused.ops import RowNorm
    from llama_core.backends.fused.product_kernels import add_product, gated_product, product

    norm = torch.zeros(shape.dim, dtype=dtype)
    for rows in row_counts:
        x, between = torch.zeros((rows, shape.dim), dtype=dtype), torch.zeros((rows, shape.hidden), dtype=dtype)
        for name in formats:
            up, down = held(name, 2 * shape.hidden, shape.dim, dtype), held(name, shape.dim, shape.hidden, dtype)
            gated_product(x, up, None)
            product(x, up)
            partial = add_product(x, between, down, None)
            if partial is not None:
                TritonOps().add_norm(x, partial, RowNorm(norm, 1e-5))
            if shape.has_biases and name == formats[0]:
                gated_product(x, up, torch.zeros(2 * shape.hidden, dtype=dtype))
                add_product(x, between, down, norm)


def held(name: str, outputs: int, inputs: int, dtype: torch.dtype) -> "HeldWeights":
    """Weights without values, in memory that is never touched."""
    from llama_core.backends.weight_formats.format import HeldWeights

    is_packed, groups = name in ("int4", "int4_min"), inputs // 32
    if name == "plain":
        return HeldWeights(torch.empty((outputs, inputs), dtype=dtype))
    code_type = torch.uint8 if is_packed or name == "fp8" else torch.int8
    codes = torch.empty((outputs, inputs // 2 if is_packed else inputs), dtype=code_type)
    if name in ("int8", "fp8"):
        return HeldWeights(codes, torch.empty(outputs))
    scales = torch.empty((outputs, groups), dtype=torch.float16)
    return HeldWeights(codes, scales, scales if name == "int4_min" else None, is_packed)


def launch_sampling(vocab: int) -> None:
    """Every kernel of a head behind the logits, with and without rules and masks."""
    from typing import get_args

    from llama_core.backends import logit_rules
    from llama_core.backends.fused.kernels import TritonSampler
    from llama_core.backends.fused.sampling.sampler import Mode, SamplingState
    from llama_core.backends.fused.step_plan import SampleTensors
    from llama_core.backends.sampling_tensors import SlotSamplingArray

    rows, slots = 2, 3
    index, cpu = torch.zeros(rows, dtype=torch.int64), torch.device("cpu")
    state = SamplingState(
        torch.zeros((slots, 4096), dtype=torch.int64),
        SlotSamplingArray(slots, cpu),
        torch.zeros((slots, logit_rules.table_words(vocab)), dtype=torch.int64),
        index,
        torch.zeros((rows, logit_rules.bit_words(vocab)), dtype=torch.int64),
    )
    sampler, logits = TritonSampler(state, rows, vocab), torch.zeros((rows, vocab))
    for mode in get_args(Mode):
        sampler.sample(logits, SampleTensors(index, index, index), mode)
    sampler.logprobs(logits, index)
