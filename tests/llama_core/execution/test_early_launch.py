"""Programmatic dependent launch: no interpreter runs two kernels at once, so what makes it safe is read from the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    by_name = {function.name: function for function in functions()}
    for name in kernels:
        assert first_statement(by_name[name]) == BEGINS, name
    # A program that left before it waited would let a later kernel read what an earlier one still writes.
    assert {function.name for function in functions() if BEGINS in map(ast.unparse, function.body)} == kernels
    assert WAITS in ast.unparse(by_name["begin_early"])


def test_products_let_the_next_kernel_begin_and_wait_in_order_themselves() -> None:
    for function in functions():
        if function.name in ("_product_of_rows", "_gated_product"):
            assert first_statement(function) == "let_next_begin(is_early)"
            assert WAITS not in ast.unparse(function) and BEGINS not in ast.unparse(function)


def test_no_kernel_begins_early_on_a_machine_without_a_gpu() -> None:
    pytest.importorskip("triton")
    from llama_core.execution.fused.kernel_functions import early_launch, has_early_launch

    has_early_launch.cache_clear()
    assert early_launch() == {"is_early": False}
