"""Compiles Triton kernels for GPUs that this machine lacks, and reads what the assembler says of them.

The product's own launches run on small CPU tensors behind a driver that compiles for `Driver.sm` and launches nothing, so that
kernels are specialized as on a GPU.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

import ast
import contextlib
import io
import math
import os
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch


@dataclass(frozen=True, slots=True)
class Target:
    """Limits of a compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").

    block_shared, sm_shared: bytes of shared memory of one block, and of one multiprocessor. warps, blocks: that one
    multiprocessor holds.
    """

    block_shared: int
    sm_shared: int
    warps: int
    blocks: int

    def occupancy(self, registers: int, shared: int, num_warps: int) -> float:
        """The part of a multiprocessor's warps that run, with so many registers a thread and bytes of shared memory a block.

        Registers are given to warps by 256 (CUDA Occupancy Calculator); each block takes 1 KiB of shared memory more.
        """
        registers_a_warp = math.ceil(max(1, registers) * 32 / 256) * 256
        by_registers = 65_536 // (registers_a_warp * num_warps)
        by_shared = self.sm_shared // (shared + 1024)
        return min(by_registers, by_shared, self.blocks, self.warps // num_warps) * num_warps / self.warps


TARGETS: Final = {
    80: Target(166_912, 167_936, 64, 32),
    86: Target(101_376, 102_400, 48, 16),
    89: Target(101_376, 102_400, 48, 24),
    90: Target(232_448, 233_472, 64, 32),
    100: Target(232_448, 233_472, 64, 32),
    120: Target(101_376, 102_400, 48, 24),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A compiled kernel. spills: bytes of registers that one thread stores in memory."""

    kernel: str
    sm: int
    registers: int
    spills: int
    shared: int
    num_warps: int

    @property
    def occupancy(self) -> float:
        return TARGETS[self.sm].occupancy(self.registers, self.shared, self.num_warps)


# What no thread may do before it waits: write memory, copy from it, read it other than by `ld`, or leave the statements that
# all threads execute.
_NOT_BEFORE_A_WAIT: Final = re.compile(
    r"\b(?:(?:st|atom|red)\.(?!shared)|(?:cp|multimem|ldu|tex|suld|sust|tensormap)\.|(?:bra|brx|ret|exit|call)\b)"
)
_LOAD: Final = re.compile(r"ld\.(?!param|shared)")
_INSTRUCTION: Final = re.compile(r"(@!?%?\w+\s+)?([a-z][\w.:]*)\s+(.*)", re.DOTALL)
_REGISTER: Final = re.compile(r"%(?!tid|ctaid|ntid|nctaid)\w+")
_PARAMETER: Final = re.compile(r"\w+_param_(\d+)")


def waits_first(ptx: str, may_read: Set[int] = frozenset()) -> bool:
    """Whether all threads of a kernel wait for the kernel before (programmatic dependent launch) before they access memory,
    but for that of the parameters `may_read`, by their numbers."""
    before, wait, _ = re.sub(r"//.*", "", ptx).partition("\tgriddepcontrol.wait;")
    if not wait or _NOT_BEFORE_A_WAIT.search(before) is not None:
        return False
    sources: dict[str, frozenset[int]] = {}  # of each register, the parameters that its value comes from
    # Braces begin a block of instructions, or stand around a vector of registers.
    for statement in re.split(r"[;\n]|\{(?!\s*%)", before):
        if (found := _INSTRUCTION.match(statement.strip())) is None:
            continue
        guard, name, operands = found.groups()
        written, _, read = operands.partition("}," if operands.startswith("{") else ",")
        origin = frozenset(int(number) for number in _PARAMETER.findall(read))
        origin = origin.union(*(sources.get(register, frozenset()) for register in _REGISTER.findall(read)))
        if _LOAD.match(name) and (not origin or not origin <= may_read):
            return False
        for register in _REGISTER.findall(written):
            # Without the guard's condition, the register keeps its value.
            sources[register] = origin | sources.get(register, frozenset()) if guard else origin
    return True


PRODUCT: Final = Path(__file__).parents[2] / "llama_core"
WAIT: Final = "wait_for_previous(is_early)"
# Parameters whose memory no kernel of the layers writes.
CONSTANT: Final = frozenset(("weight", "q_norm", "k_norm", "table", "k_table", "positions", "slot_mapping", "tiles"))


@cache
def functions() -> list[ast.FunctionDef]:
    """All functions of llama_core, from their source."""
    trees = [ast.parse(path.read_text()) for path in sorted(PRODUCT.rglob("*.py"))]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def early_kernels() -> dict[str, ast.FunctionDef]:
    """The kernels that wait for the kernel before, by name."""
    return {function.name: function for function in functions() if WAIT in map(ast.unparse, function.body)}


def may_read(name: str) -> frozenset[int]:
    """The numbers of the parameters that a compiled kernel may read before it waits. Pointers come before numbers, which the
    compiler may leave out."""
    arguments = [argument.arg for argument in early_kernels()[name].args.args]
    return frozenset(index for index, argument in enumerate(arguments) if argument in CONSTANT)


@contextlib.contextmanager
def compiling_for(sm: int) -> Iterator[list[Variant]]:
    """The kernels that are launched inside, one for each distinct compile key. Once in a process, before Triton is imported."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    from triton.runtime import driver as drivers

    variants: list[Variant] = []
    log = io.StringIO()
    drivers.set_active(_driver(sm, variants, log))
    with contextlib.redirect_stdout(log):
        yield variants


def _driver(sm: int, variants: list[Variant], log: io.StringIO) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Utils:
        def load_binary(self, name, kernel, shared, device):
            text = log.getvalue()
            log.seek(0)
            log.truncate()
            registers = re.findall(r"Used (\d+) registers", text)
            spills = re.findall(r"(\d+) bytes spill stores", text)
            assert registers, f"the assembler says nothing of {name}"
            variants.append(Variant(name, sm, int(registers[-1]), int(spills[-1]), shared, Launcher.latest_warps))
            return object(), 0, 0, 0, 1024

        def get_device_properties(self, device):
            return {"max_shared_mem": TARGETS[sm].block_shared, "multiprocessor_count": 132, "warpSize": 32}

    class Launcher:
        latest_warps = 0

        def __init__(self, src, metadata):
            Launcher.latest_warps = metadata.num_warps  # made before its binary is loaded

        def __call__(self, *args, **kwargs):
            pass

    class Driver(DriverBase):
        launcher_cls = Launcher
        utils = Utils()

        def __init__(self):
            pass

        @classmethod
        def is_active(cls):
            return True

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", sm, 32)

        def get_active_torch_device(self):
            return torch.device("cpu")

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_benchmarker(self):
            raise NotImplementedError

    return Driver()
