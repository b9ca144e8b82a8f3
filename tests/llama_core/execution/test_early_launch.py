"""Programmatic dependent launch: no interpreter runs two kernels at once, so what makes it safe is read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.kernel_compiler import waits_first

ROOT = Path(__file__).parents[3] / "llama_core"
BEGINS, WAITS = "begin_early(is_early)", "gdc_wait"


def functions() -> Iterator[ast.FunctionDef]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield node


def first_statement(function: ast.FunctionDef) -> str:
    """Behind the docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return ast.unparse(body[0])


def launched_early() -> set[str]:
    """The names of kernels that are launched in a function that asks for `early_launch`."""
    names = set()
    for function in functions():
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        if "early_launch" in {ast.unparse(call.func) for call in calls}:
            names |= {ast.unparse(call.func.value) for call in calls if isinstance(call.func, ast.Subscript)}
    return names


def test_each_kernel_that_begins_early_waits_before_anything_else() -> None:
    kernels = launched_early()
    assert {"_add_norm", "_rotate_and_store", "_attend", "_combine_splits"} == kernels
    # Nothing else asks Triton for it.
    assert [path.name for path in ROOT.rglob("*.py") if "launch_pdl" in path.read_text()] == ["kernel_functions.py"]
    by_name = {function.name: function for function in functions()}
    for name in kernels:
        assert first_statement(by_name[name]) == BEGINS, name
    # A program that left before it waited would let a later kernel read what an earlier one still writes.
    assert {function.name for function in functions() if BEGINS in map(ast.unparse, function.body)} == kernels
    assert WAITS in ast.unparse(by_name["begin_early"])


def test_products_let_the_next_kernel_begin_and_wait_in_order_themselves() -> None:
    by_name = {function.name: function for function in functions()}
    for function in (by_name["_product_of_rows"], by_name["_gated_product"]):
        assert first_statement(function) == "let_next_begin(is_early)"
        assert WAITS not in ast.unparse(function) and BEGINS not in ast.unparse(function)


def test_a_kernel_that_accesses_memory_before_it_waits_is_found() -> None:
    """`make gpu-check` looks at all kernels: a compiler might move a load."""
    arguments, wait = "\tld.param.b64 \t%rd1, [_attend_param_0];\n", "\tgriddepcontrol.wait; // dummy %r1\n"
    alloc = (
        "\t@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r32], 32;\n\tld.shared.b32 \t%r9, [%r32];\n"
    )
    load = "\t@%p1 ld.global.b32 { %r2 }, [ %rd1 + 0 ];\n"
    copy = "\tcp.async.cg.shared.global [ %r1 + 0 ], [ %rd2 + 0 ], 0x10, %r3;\n"
    assert waits_first(arguments + alloc + wait + load + copy + "\tret;\n")
    for before in (load, copy, "\t@%p1 bra \t$L__BB0_2;\n", "\t@%p2 red.global.add.s32 [%rd1], 1;\n"):
        assert not waits_first(arguments + before + wait + load), before
    assert not waits_first(arguments + load)


class NoDriver:
    @property
    def active(self) -> object:
        raise RuntimeError("0 active drivers ([]). There should only be one.")


@pytest.mark.parametrize(
    ("target", "interprets", "begins_early"),
    [
        (("cuda", 80), False, False),
        (("cuda", 90), False, True),
        (("cuda", 120), False, True),
        (("cuda", 90), True, False),
        (("hip", "gfx942"), False, False),
        (None, False, False),
    ],
)
def test_kernels_begin_early_on_gpus_from_sm_90_on(
    target: tuple[str, Any] | None, interprets: bool, begins_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in Triton's interpreter, which has no such instruction, beside such a GPU."""
    pytest.importorskip("triton")
    import triton
    from triton.backends.compiler import GPUTarget

    from llama_core.execution.fused import kernel_functions

    driver: object = NoDriver()
    if target is not None:
        driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: GPUTarget(*target, 32)))
    monkeypatch.setattr(kernel_functions, "driver", driver)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interprets)
    monkeypatch.setattr(kernel_functions, "has_early_launch", kernel_functions.has_early_launch.__wrapped__)
    expected = {"is_early": True, "launch_pdl": True} if begins_early else {"is_early": False}
    assert kernel_functions.early_launch() == expected
