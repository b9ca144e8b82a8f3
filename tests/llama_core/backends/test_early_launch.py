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
)

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
