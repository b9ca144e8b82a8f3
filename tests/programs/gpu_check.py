"""Compiles every Triton kernel for GPUs that this machine lacks: `make gpu-check`, or `python -m tests.programs.gpu_check`.

The shapes are those of the families on 1 to 8 ranks in bfloat16, and of some families in the other dtypes; each distinct
compile key is compiled once. Exit status 1 if a kernel does not compile, needs more shared memory than a block may have, spills
more than SPILL_LIMIT bytes a thread, or is launched before the kernel before has ended and does not wait for it first.
--json writes the worst variant of each kernel and GPU, with those of --compare, such a file; both are printed side by side.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from benchmarks.harness.common import machine
from tests.support.early_kernels import may_read
from tests.support.kernel_compiler import TARGETS, Variant, compiling_for, waits_first

if TYPE_CHECKING:
    from llama_core.execution.weight_formats.format import HeldWeights

SPILL_LIMIT: Final = 64  # bytes of one thread; more than a few registers would show in a kernel that waits for memory
DTYPES: Final = ("bfloat16", "float16", "float32")
RANKS: Final = (1, 2, 4, 8)
BLOCK_SIZES: Final = (16, 32)
MULTICAST_SM: Final = 90  # the first that has the instructions
EARLY_SM: Final = 90  # the first that has programmatic dependent launch
VOCABULARIES: Final = (640, 32_000, 128_256, 151_936)  # of the small model of the tests, and of families


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

# Unless families or ranks are named, the layers of these alone are compiled in float16 and float32, on the fewest ranks, and
# sums over ranks have no bias there. They are one for each head size, window, bias and norm.
OF_ALL_DTYPES: Final = frozenset(
    ("Llama 3 8B", "SmolLM2 135M", "Mistral 7B", "Qwen2.5 0.5B", "Qwen3 8B", "heads of 96", "heads of 256")
)
# These alone are compiled with every size of blocks, in bfloat16; others with the first. The size is a constant of the
# attention kernel.
OF_ALL_SIZES: Final = frozenset(("Llama 3.2 1B", "Mistral 7B"))
# Attention is batch-invariant, and its cache has float8, for these alone: with each number of query heads a key head.
OF_ALL_MODES: Final = OF_ALL_DTYPES | {"Llama 2 7B", "Llama 2 70B"}

# With many outputs, and with few, whose inputs are split. Compile keys depend on no more than that. Whatever families are
# named: both in bfloat16, the first in float16, and none in float32, where quantized weights serve comparisons alone. All
# variants take about 15 minutes on two cores.
QUANTIZED_SHAPES: Final = (FAMILIES["Llama 2 70B"], FAMILIES["TinyLlama"].on(4))
ROWS: Final = (1, 2, 20, 64)  # one for each tile of the products
NUM_QUANTIZED_SHAPES: Final = {torch.bfloat16: 2, torch.float16: 1, torch.float32: 0}
FORMATS: Final = ("int8", "fp8", "int8_groups", "int4", "int4_min")


def launch_layer(shape: Shape, dtype: torch.dtype, block_size: int, *, in_all_modes: bool) -> None:
    """Every kernel that a layer launches between its products, in a step of decodes and of chunks."""
    from llama_core.execution.fused.kernels import TritonOps
    from llama_core.execution.fused.ops import HeadNorms
    from llama_core.execution.fused.step_plan import TILE_COLUMNS, AttentionTiles
    from llama_core.execution.kv_cache import FLOAT8_BYTES
    from llama_core.step_time.attention_splits import max_split_decode_tokens

    def new(*sizes: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(sizes, dtype=of)

    ops, rows, total = TritonOps(), 2, shape.heads + 2 * shape.kv_heads
    keys, values = (new(2, block_size, shape.kv_heads, shape.head_dim) for _ in range(2))
    positions, table = new(rows, of=torch.int64), new(64, shape.head_dim // 2, 2, of=torch.float32)
    weight = new(shape.dim)
    ops.add_norm(new(rows, shape.dim), None, weight, 1e-5)
    ops.add_norm(new(rows, shape.dim), new(rows, shape.dim), weight, 1e-5)
    qkv_bias = gate_bias = norms = None
    if shape.has_biases:
        qkv_bias, gate_bias = new(total * shape.head_dim), new(2 * shape.hidden)
        ops.add_norm(new(rows, shape.dim), new(rows, shape.dim), weight, 1e-5, weight)
    if shape.has_norms:
        norms = HeadNorms(new(shape.head_dim), new(shape.head_dim), 1e-5)
    q = ops.rotate_and_store(
        new(rows, total, shape.head_dim), table, positions, positions, keys, values, qkv_bias, norms
    )
    ops.gated_silu(new(rows, 2 * shape.hidden), gate_bias)
    ops.add_time(new(2, of=torch.int64), 1, -shape.heads)
    index = new(rows, of=torch.int64)
    tokens = new(rows, 4096, of=torch.int64)
    ops.embed(tokens, tokens, index, index, block_size, new(rows, shape.dim))
    ops.store_samples(index, index, index, tokens, index)
    tiles = new(rows, TILE_COLUMNS, of=torch.int64)
    tables = new(8, 4096 // block_size, of=torch.int64)
    step = AttentionTiles(tiles, tiles), shape.window
    ops.attend(q, keys, values, tables, *step)
    # Enough decodes that one program computes all splits of each.
    large = max_split_decode_tokens(shape.kv_heads) + 1
    many = AttentionTiles(new(large, TILE_COLUMNS, of=torch.int64), tiles[:0]), shape.window
    queries = new(large, total, shape.head_dim)[:, : shape.heads]
    ops.attend(queries, keys, values, tables, *many)
    if in_all_modes:
        invariant = TritonOps(batch_invariant=True)
        invariant.attend(q, keys, values, tables, *step)
        invariant.attend(queries, keys, values, tables, *many)
        floats = [new(*keys.shape, of=FLOAT8_BYTES) for _ in range(2)]
        ops.attend(q, floats[0], floats[1], tables, *step)
        ops.attend(queries, floats[0], floats[1], tables, *many)
        ops.rotate_and_store(
            new(rows, total, shape.head_dim), table, positions, positions, floats[0], floats[1], qkv_bias, norms
        )


def launch_sums(dim: int, dtype: torch.dtype, num_ranks: int, *, has_switch: bool, has_bias: bool) -> None:
    """The one-shot all-reduce of a group, by reading and by NVLink's switch. has_bias: also with a bias."""
    from llama_core.execution.fused.all_reduce_kernels import sum_add_norm
    from llama_core.execution.fused.peer_memory import PeerMemory

    device = torch.device("cpu")
    rows, weight = torch.zeros((2, dim), dtype=dtype), torch.zeros(dim, dtype=dtype)
    for multicast in (0, 1 << 20) if has_switch and dtype != torch.float16 else (0,):
        memory = PeerMemory.of(0, 8, dim * dtype.itemsize, [1 << 20] * num_ranks, device, None, multicast)
        for bias in (None, weight) if has_bias else (None,):
            sum_add_norm(memory, 0, rows, rows, weight, 1e-5, bias)


def launch_products(dtype: torch.dtype, row_counts: Seq[int]) -> None:
    """The product of each quantized format, for each number of rows, and batch-invariant products."""
    from llama_core.execution.weight_formats.invariant_kernels import multiply_in_order
    from llama_core.execution.weight_formats.kernels import multiply

    outputs = inputs = 256
    codes = torch.zeros((outputs, inputs), dtype=torch.int8)
    packed = torch.zeros((outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.zeros((outputs, inputs // 32), dtype=torch.float16)
    for rows in row_counts:
        x = torch.zeros((rows, inputs), dtype=dtype)
        multiply(x, codes, torch.zeros(outputs), None, is_packed=False)
        multiply(x, codes, scales, None, is_packed=False)
        multiply(x, codes.view(torch.uint8), torch.zeros(outputs), None, is_packed=False)  # float8
        multiply(x, packed, scales, None, is_packed=True)
        multiply(x, packed, scales, scales, is_packed=True)
    # Two splits, and numbers of rows in one tile and in two.
    weight = torch.zeros((outputs, 1024), dtype=dtype)
    for rows in (16, 128):
        multiply_in_order(torch.zeros((rows, 1024), dtype=dtype), weight)
        # The tiles that `batch_invariant` takes for few rows are those of many.
        multiply(torch.zeros((rows, inputs), dtype=dtype), packed, scales, None, is_packed=True, batch_invariant=True)


def launch_fused_products(shape: Shape, dtype: torch.dtype, formats: Seq[str], row_counts: Seq[int]) -> None:
    """Products with SwiGLU and the addition to hidden states in their epilogues, for each number of rows."""
    from llama_core.execution.fused.kernels import TritonOps
    from llama_core.execution.fused.product_kernels import add_product, gated_product, product

    norm = torch.zeros(shape.dim, dtype=dtype)
    for rows in row_counts:
        x, between = torch.zeros((rows, shape.dim), dtype=dtype), torch.zeros((rows, shape.hidden), dtype=dtype)
        for name in formats:
            up, down = held(name, 2 * shape.hidden, shape.dim, dtype), held(name, shape.dim, shape.hidden, dtype)
            gated_product(x, up, None)
            product(x, up)
            partial = add_product(x, between, down, None)
            if partial is not None:
                TritonOps().add_norm(x, partial, norm, 1e-5, num_splits=len(partial))
            if shape.has_biases and name == formats[0]:
                gated_product(x, up, torch.zeros(2 * shape.hidden, dtype=dtype))
                add_product(x, between, down, norm)


def held(name: str, outputs: int, inputs: int, dtype: torch.dtype) -> "HeldWeights":
    """Weights without values, in memory that is never touched."""
    from llama_core.execution.weight_formats.format import HeldWeights

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

    from llama_core.execution.fused import rule_table
    from llama_core.execution.fused.sampler import Mode, SamplingState
    from llama_core.execution.fused.step_plan import SampleTensors
    from llama_core.execution.fused.triton_sampler import TritonSampler
    from llama_core.execution.sampling_tensors import SlotSamplingArray

    rows, slots = 2, 3
    index, cpu = torch.zeros(rows, dtype=torch.int64), torch.device("cpu")
    state = SamplingState(
        torch.zeros((slots, 4096), dtype=torch.int64),
        SlotSamplingArray(slots, cpu),
        torch.zeros((slots, rule_table.table_words(vocab)), dtype=torch.int64),
        index,
        torch.zeros((rows, rule_table.bit_words(vocab)), dtype=torch.int64),
    )
    sampler, logits = TritonSampler(state, rows, vocab), torch.zeros((rows, vocab))
    for mode in get_args(Mode):
        sampler.sample(logits, SampleTensors(index, index, index), mode)
    sampler.logprobs(logits, index)


class Choice(NamedTuple):
    """What is compiled. rows: of products."""

    families: Seq[str]
    dtypes: Seq[str]
    ranks: Seq[int]
    formats: Seq[str]
    vocabularies: Seq[int]
    rows: Seq[int]


def compile_for(sm: int, choice: Choice) -> list[Variant]:
    """In a process of its own, because Triton has one driver."""
    with tempfile.TemporaryDirectory() as cache:
        environ["TRITON_CACHE_DIR"] = cache
        with compiling_for(sm) as variants:
            families, ranks = choice.families, choice.ranks
            for vocab in choice.vocabularies:
                launch_sampling(vocab)
            for dtype in (getattr(torch, name) for name in choice.dtypes):
                launch_products(dtype, choice.rows)
                is_chosen, is_usual = (*families, *ranks) != (*FAMILIES, *RANKS), dtype == torch.bfloat16
                is_whole = is_chosen or is_usual
                for dim, count in {(FAMILIES[name].dim, count) for name in families for count in ranks if count > 1}:
                    launch_sums(dim, dtype, count, has_switch=sm >= MULTICAST_SM, has_bias=is_whole)
                for shape in QUANTIZED_SHAPES[: NUM_QUANTIZED_SHAPES[dtype]]:
                    launch_fused_products(shape, dtype, choice.formats, choice.rows)
                names = families if is_whole else [name for name in families if name in OF_ALL_DTYPES]
                counts = ranks if is_whole else [min(ranks)]
                # Equal shapes are launched once more, and compiled once.
                for name, count in itertools.product(names, counts):
                    shape = FAMILIES[name].on(count)
                    launch_fused_products(shape, dtype, ("plain",), choice.rows)
                    # float32 attention spills up to 404 bytes a thread where heads of 256 meet these modes: right, and slow.
                    has_modes = (is_chosen or name in OF_ALL_MODES) and (
                        dtype != torch.float32 or shape.head_dim <= 128
                    )
                    in_all_sizes = is_usual and name in OF_ALL_SIZES
                    for number, size in enumerate(BLOCK_SIZES if in_all_sizes else BLOCK_SIZES[:1]):
                        launch_layer(shape, dtype, size, in_all_modes=number == 0 and has_modes)
        check_early_kernels(Path(cache), sm)
    return variants


def check_early_kernels(cache: Path, sm: int) -> None:
    """Raises RuntimeError if a compiled kernel that is launched before the kernel before has ended does not wait before it
    accesses memory that other kernels write."""
    kernels = [path for path in cache.rglob("*.json") if json.loads(path.read_text()).get("launch_pdl")]
    assert bool(kernels) == (sm >= EARLY_SM)
    wrong = {
        path.stem for path in kernels if not waits_first(path.with_suffix(".ptx").read_text(), may_read(path.stem))
    }
    if wrong:
        raise RuntimeError(f"{', '.join(sorted(wrong))} on sm_{sm}: memory is accessed before griddepcontrol.wait")


def worst(variants: Seq[Variant]) -> list[dict[str, object]]:
    """For each kernel and GPU: the number of variants, most registers, spills and shared memory, and least occupancy."""
    groups: dict[tuple[str, int], list[Variant]] = {}
    for variant in variants:
        groups.setdefault((variant.kernel, variant.sm), []).append(variant)
    return [
        {
            "kernel": kernel,
            "sm": sm,
            "variants": len(group),
            "registers": max(each.registers for each in group),
            "spills": max(each.spills for each in group),
            "shared": max(each.shared for each in group),
            "occupancy": round(min(each.occupancy for each in group), 3),
        }
        for (kernel, sm), group in sorted(groups.items())
    ]


def show(rows: Seq[dict[str, object]], before: Seq[dict[str, object]]) -> None:
    earlier = {(row["kernel"], row["sm"]): row for row in before}
    columns = ("variants", "registers", "spills", "shared", "occupancy")
    print(f"{'kernel':20} {'sm':>4}" + "".join(f"{column:>22}" for column in columns))
    for row in rows:
        old = earlier.get((row["kernel"], row["sm"]))
        cells = (f"{row[column]}" + (f" (was {old[column]})" if old else "") for column in columns)
        print(f"{row['kernel']!s:20} {row['sm']!s:>4}" + "".join(f"{cell:>22}" for cell in cells))


class Part(NamedTuple):
    """What one process compiles. The parts of one GPU, but for the first, leave out what no dtype changes."""

    sm: int
    dtypes: Seq[str]
    is_first: bool

    @property
    def name(self) -> str:
        return f"sm_{self.sm} {', '.join(self.dtypes)}"


def parts_of(sms: Seq[int], dtypes: Seq[str]) -> list[Part]:
    """The longest first, so that all processes end at about the same time."""
    usual, others = dtypes[:1], dtypes[1:]
    return [Part(sm, usual, True) for sm in sms] + [Part(sm, others, False) for sm in sms if others]


def run_child(part: Part, options: argparse.Namespace) -> list[Variant]:
    """Raises RuntimeError with what the compiler says."""
    vocabularies = options.vocab if part.is_first else []
    arguments = ["--family", *options.family, "--dtype", *part.dtypes, "--ranks", *map(str, options.ranks)]
    arguments += ["--format", *options.format, "--vocab", *map(str, vocabularies), "--rows", *map(str, options.rows)]
    with tempfile.NamedTemporaryFile("r") as output:
        command = [sys.executable, "-m", "tests.programs.gpu_check", "--child", str(part.sm), output.name, *arguments]
        begin = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{part.name}: {(done.stderr or done.stdout)[-3000:]}")
        variants = [Variant(**fields) for fields in json.load(output)]
    print(f"{part.name}: {len(variants)} variants in {time.perf_counter() - begin:.0f} s", flush=True)
    return variants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sm", type=int, nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument(
        "--format", nargs="*", default=list(FORMATS), choices=FORMATS, help="quantized, of fused products"
    )
    parser.add_argument("--vocab", type=int, nargs="*", default=list(VOCABULARIES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of products")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        sm, output = options.child
        lists = options.family, options.dtype, options.ranks, options.format, options.vocab, options.rows
        found = compile_for(int(sm), Choice(*lists))
        Path(output).write_text(json.dumps([asdict(variant) for variant in found]))
        return
    parts = parts_of(options.sm, options.dtype)
    with ThreadPoolExecutor(options.processes) as pool:
        variants = [each for found in pool.map(lambda part: run_child(part, options), parts) for each in found]
    rows = worst(variants)
    before: dict[str, Any] = json.loads(options.compare.read_text()) if options.compare else {"rows": []}
    show(rows, before["rows"])
    if options.json:
        about = {"commit": machine()["commit"], "triton": version("triton"), "rows": rows}
        options.json.write_text(json.dumps({"benchmark": "gpu_check", **about, "before": before}, indent=1) + "\n")
    faults = [each for each in variants if each.spills > SPILL_LIMIT or each.shared > TARGETS[each.sm].block_shared]
    for variant in faults:
        print(
            f"{variant.kernel} on sm_{variant.sm}: {variant.spills} bytes spilled, {variant.shared} bytes of shared memory"
        )
    print(f"{len(variants)} variants compiled, {len(faults)} of them over a limit")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
