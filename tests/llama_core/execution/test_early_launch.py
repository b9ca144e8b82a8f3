"""Programmatic dependent launch: no interpreter runs two kernels at once, so what makes it safe is read from the source."""

import ast

from tests.support.early_kernels import (
    CONSTANT,
    ROOT,
    WAIT,
    before_wait,
    early_kernels,
    functions,
    launched_early,
    loaded_before_wait,
    may_read,
)
from tests.support.kernel_compiler import waits_first

LETS_START = "let_next_start(is_early)"
PRODUCTS = {"_product_of_rows", "_gated_product"}


def test_each_kernel_that_starts_early_waits_before_it_reads_what_others_write() -> None:
    kernels = early_kernels()
    assert {"_add_norm", "_rotate_and_store", "_attend", "_combine_splits", *PRODUCTS} == set(kernels)
    # A program that left before it waited would let a later kernel read what an earlier one still writes.
    assert launched_early() == set(kernels)
    # Nothing else asks Triton for it.
    assert [path.name for path in ROOT.rglob("*.py") if "launch_pdl" in path.read_text()] == ["layer_kernels.py"]
    (wait,) = (function for function in functions() if function.name == WAIT.partition("(")[0])
    assert "gdc_wait" in ast.unparse(wait)
    for name, kernel in kernels.items():
        assert loaded_before_wait(kernel) <= CONSTANT, name
        earlier = "\n".join(map(ast.unparse, before_wait(kernel)))
        assert "tl.store" not in earlier and "return" not in earlier, name
    assert loaded_before_wait(kernels["_rotate_and_store"]) == CONSTANT - {"weight", "tiles"}
    assert not any(loaded_before_wait(kernels[name]) for name in PRODUCTS)


def test_no_product_starts_beside_another() -> None:
    """A kernel before a product lets it start after the wait for the product before, and SwiGLU's product at its end."""
    kernels = early_kernels()
    for name in ("_add_norm", "_combine_splits", "_gated_product"):
        texts = list(map(ast.unparse, kernels[name].body))
        assert texts.count(LETS_START) == 1 and texts.index(LETS_START) > texts.index(WAIT), name
    assert ast.unparse(kernels["_gated_product"].body[-1]) == LETS_START
    attend = list(map(ast.unparse, kernels["_attend"].body))
    sooner, later = f"if combine_follows:\n    {LETS_START}", f"if not combine_follows:\n    {LETS_START}"
    assert attend.index(sooner) < attend.index(WAIT) < attend.index(later)
    assert sum(text.count(LETS_START) for text in attend) == 2


def test_a_kernel_may_read_some_memory_before_it_waits() -> None:
    assert may_read("_attend") == {4} and may_read("_add_norm") == {3} and not may_read("_gated_product")
    tiles = "\tld.param.b64 \t%rd1, [_attend_param_4];\n\tmad.wide.s32 \t%rd2, %r46, 8, %rd1;\n"
    queries, wait = "\tld.param.b64 \t%rd3, [_attend_param_0];\n", "\tgriddepcontrol.wait; // dummy %r1\n"
    load, derived = "\tld.global.b64 { %rd5 }, [ %rd2 + 0 ];\n", "\tadd.s64 \t%rd6, %rd3, %rd5;\n"
    assert waits_first(tiles + load + wait, {4})
    assert not waits_first(tiles + load + wait, {0})
    pair = "\t@%p1 ld.global.v2.b32 { %r2, %r3 }, [ %rd6 + 0 ];\n"
    assert not waits_first(tiles + queries + load + derived + pair + wait, {4})
    assert waits_first(tiles + queries + load + derived + pair + wait, {0, 4})
    assert not waits_first("\tld.global.b64 { %rd5 }, [ %rd9 + 0 ];\n" + wait, {4})  # of no parameter
