"""The products of every weight format have the same bits on AVX2, AVX-512, VNNI, AMX and plain vectors, and are near exact.

Each run compares AVX2 with AVX-512, where the CPU has it, and with AMX, whose instructions are emulated, for bfloat16
activations; --full compares all.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from llama_core.model.weight_formats import CODINGS
from tests.support.native_builds import HAS_AVX512, cache_of_tests

ROOT = Path(__file__).parents[3]
SUPPORT = ROOT / "tests" / "support"
NATIVE = ROOT / "llama_core" / "backends" / "native"
FLAGS = ("-std=c++20", "-O2", "-fno-math-errno", "-ffp-contract=fast", "-pthread", "-Wno-psabi")
EMULATED = ("-march=x86-64-v3", "-include", str(SUPPORT / "emulated_intrinsics.hpp"))
# Of the paths that this CPU may lack, VNNI and AMX run in plain C++. All have fused multiply-add.
BUILDS = {
    "AVX2": ("-march=x86-64-v3",),
    **({"AVX-512": ("-march=skylake-avx512",)} if HAS_AVX512 else {}),  # without VNNI and bfloat16 instructions
    "plain": ("-march=x86-64-v2", "-mavx", "-mfma"),
    "VNNI": (*EMULATED, "-DEMULATE_VNNI"),
    "AMX": (*EMULATED, "-DEMULATE_VNNI", "-DEMULATE_AMX"),
    "this CPU": ("-march=native",),
}
# The largest error of a product, in units of the sum of the magnitudes of its terms. Weights in codes by bfloat16 activations
# are rounded to steps of 256 inputs. Where minima lie far from zero beside their scale, groups get other codes.
STORED = {"float32": 1e-5, "bfloat16": 0.008}
FAR = {"int4_zero_128": 0.02, "q4_k": 0.15, "q5_k": 0.15}
# Inputs that are not whole groups are quantized from values that are not multiples of a scale.
ROUNDED = {"int8_groups": 0.005, "int4": 0.03, "int4_min": 0.03}


class Product(NamedTuple):
    name: str
    activations: str
    inputs: int
    rows: int
    bits: str
    same_alone: bool
    error: float


def compiled(build: str, is_full: bool) -> Path:
    """A build's program, compiled where no earlier run has compiled the same sources. is_full: with float32 activations."""
    compiler = os.environ.get("LLAMA_CXX") or os.environ.get("CXX") or "c++"
    flags = (*FLAGS, *BUILDS[build], *(() if is_full else ("-DONLY_BFLOAT16",)))
    command = [compiler, *flags, f"-I{NATIVE}", str(SUPPORT / "weight_products.cpp")]
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    instructions = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    digest = hashlib.sha256(" ".join([*command, instructions]).encode() + version)
    for source in sorted([*NATIVE.rglob("*.hpp"), *SUPPORT.glob("*.[ch]pp")]):
        digest.update(source.read_bytes())
    folder = cache_of_tests()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    program = folder / f"products-{digest.hexdigest()[:16]}"
    if not program.exists():
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as part:
            pass
        subprocess.run([*command, "-o", part.name], check=True, capture_output=True)
        Path(part.name).replace(program)
    return program


def products(build: str, is_full: bool) -> list[Product]:
    program = compiled(build, is_full)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    found = []
    for line in lines:
        name, activations, inputs, rows, bits, same, error = line.split()
        found.append(Product(name, activations, int(inputs), int(rows), bits, same == "1", float(error)))
    return found


IN_EACH_RUN = [build for build in BUILDS if build in ("AVX2", "AVX-512", "AMX")]


@pytest.fixture(scope="module")
def by_build(pytestconfig: pytest.Config) -> dict[str, list[Product]]:
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the builds need AVX2")
    if not shutil.which(os.environ.get("LLAMA_CXX") or os.environ.get("CXX") or "c++"):
        pytest.skip("there is no C++ compiler")
    with ThreadPoolExecutor(2) as pool:
        is_full = bool(pytestconfig.getoption("--full"))
        builds = list(BUILDS) if is_full else IN_EACH_RUN
        return dict(zip(builds, pool.map(partial(products, is_full=is_full), builds), strict=True))


def test_products_have_the_same_bits_whatever_the_instructions(by_build: dict[str, list[Product]]) -> None:
    for build, found in by_build.items():
        for mine, theirs in zip(found, by_build["AVX2"], strict=True):
            # AVX512_BF16 and AMX add pairs of bfloat16 products in another order.
            if build != "this CPU" or mine.name != "bfloat16":
                assert mine[:5] == theirs[:5], build


def test_every_build_chooses_the_same_experts(by_build: dict[str, list[Product]]) -> None:
    """Of 10,000 tokens; of equal logits the lower number, and of those one bit apart the larger."""
    chosen = {product.bits for found in by_build.values() for product in found if product.name == "experts"}
    assert len(chosen) == 1
    assert all(product.same_alone for found in by_build.values() for product in found if product.name == "experts")


def test_a_rows_products_do_not_depend_on_other_rows(by_build: dict[str, list[Product]]) -> None:
    names = {product.name for product in by_build["AMX"]}
    assert names >= {"int8", "int8_groups", "int4", "int4_zero_128", "q4_k", "q5_k", "q6_k", "iq4_xs", "bfloat16"}
    assert names >= CODINGS.keys() or len(by_build) == len(IN_EACH_RUN)
    for build, found in by_build.items():
        assert [product for product in found if not product.same_alone] == [], build


def test_products_are_near_the_exact_products_of_the_weights(by_build: dict[str, list[Product]]) -> None:
    for product in by_build["AVX2"]:
        if product.name == "experts":
            continue
        bound = max(STORED[product.activations], FAR.get(product.name, 0) if product.activations == "bfloat16" else 0)
        if product.inputs % 32:
            bound = max(bound, ROUNDED.get(product.name, 0))
        assert 0 < product.error < bound, product
