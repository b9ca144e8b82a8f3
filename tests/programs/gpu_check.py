"""Compiles every Triton kernel for GPUs that this machine lacks: `make gpu-check`, or `python -m tests.programs.gpu_check`.

The shapes are those of the families on 1 to 8 ranks in bfloat16, and of some families in the other dtypes; each distinct
compile key is compiled once. Exit status 1 if a kernel does not compile, needs more shared memory than a block may have, spills
more than SPILL_LIMIT bytes a thread, or is launched before the kernel before has ended and does not wait for it first.
--json writes the worst variant of each kernel and GPU.
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
from typing import Final, NamedTuple

import torch

from benchmarks.harness.common import machine
from tests.programs.kernel_compiler import TARGETS, Variant, compiling_for, may_read, waits_first
from tests.programs.kernel_launches import (
    FAMILIES,
    launch_fused_products,
    launch_layer,
    launch_products,
    launch_sampling,
)

SPILL_LIMIT: Final = 64  # bytes of one thread; more than a few registers would show in a kernel that waits for memory
DTYPES: Final = ("bfloat16", "float16", "float32")
RANKS: Final = (1, 2, 4, 8)
BLOCK_SIZES: Final = (16, 32)
EARLY_SM: Final = 90  # the first that has programmatic dependent launch
VOCABULARIES: Final = (640, 32_000, 128_256, 151_936)  # of the small model of the tests, and of families

# Unless families or ranks are named, the layers of these alone are compiled in float16 and float32, on the fewest ranks. They
# are one for each head size, window, bias and norm.
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


def show(rows: Seq[dict[str, object]]) -> None:
    columns = ("variants", "registers", "spills", "shared", "occupancy")
    print(f"{'kernel':20} {'sm':>4}" + "".join(f"{column:>11}" for column in columns))
    for row in rows:
        print(f"{row['kernel']!s:20} {row['sm']!s:>4}" + "".join(f"{row[column]!s:>11}" for column in columns))


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
    show(rows)
    if options.json:
        about = {"commit": machine()["commit"], "triton": version("triton"), "rows": rows}
        options.json.write_text(json.dumps({"benchmark": "gpu_check", **about}, indent=1) + "\n")
    faults = [each for each in variants if each.spills > SPILL_LIMIT or each.shared > TARGETS[each.sm].block_shared]
    for variant in faults:
        print(
            f"{variant.kernel} on sm_{variant.sm}: {variant.spills} bytes spilled, {variant.shared} bytes of shared memory"
        )
    print(f"{len(variants)} variants compiled, {len(faults)} of them over a limit")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
