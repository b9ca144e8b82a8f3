"""What kernels with programmatic dependent launch load before they wait for the kernel before, read from their source."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2] / "llama_core"
WAIT: Final = "wait_for_previous(is_early)"
# Parameters whose memory no kernel of the layers writes.
CONSTANT: Final = frozenset(("weight", "q_norm", "k_norm", "table", "positions", "slot_mapping", "tiles"))


def functions() -> Iterator[ast.FunctionDef]:
    """All functions of llama_core."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield node


def launched_early() -> set[str]:
    """The names of kernels that are launched in a function that asks for `early_launch`."""
    names = set()
    for function in functions():
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        if "early_launch" in {ast.unparse(call.func) for call in calls}:
            launched = [ast.unparse(call.func.value) for call in calls if isinstance(call.func, ast.Subscript)]
            names |= {name.rpartition(".")[2] for name in launched}
    return names


@cache
def early_kernels() -> dict[str, ast.FunctionDef]:
    """The kernels that wait for the kernel before, by name."""
    return {function.name: function for function in functions() if WAIT in map(ast.unparse, function.body)}


def before_wait(kernel: ast.FunctionDef) -> list[ast.stmt]:
    """The statements before the wait, which all programs execute."""
    texts = [ast.unparse(statement) for statement in kernel.body]
    return kernel.body[: texts.index(WAIT)]


def loaded_before_wait(kernel: ast.FunctionDef) -> set[str]:
    """The parameters from whose memory the kernel loads before it waits."""
    pointers = {argument.arg: argument.arg for argument in kernel.args.args}
    loaded = set()
    for node in (node for statement in before_wait(kernel) for node in ast.walk(statement)):
        if isinstance(node, ast.Assign):
            pairs = zip(_parts(node.targets[0]), _parts(node.value), strict=False)
            pointers |= {ast.unparse(target): pointers.get(_first_name(value), "") for target, value in pairs}
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
            loaded.add(pointers[_first_name(node.args[0])])
    return loaded


def _parts(value: ast.expr) -> list[ast.expr]:
    return value.elts if isinstance(value, ast.Tuple) else [value]


def may_read(name: str) -> frozenset[int]:
    """The numbers of the parameters that a compiled kernel may read before it waits. Pointers come before numbers, which the
    compiler may leave out."""
    arguments = [argument.arg for argument in early_kernels()[name].args.args]
    return frozenset(index for index, argument in enumerate(arguments) if argument in CONSTANT)


def _first_name(value: ast.expr) -> str:
    """The pointer in `pointer + offsets`."""
    while isinstance(value, ast.BinOp):
        value = value.left
    return ast.unparse(value)
