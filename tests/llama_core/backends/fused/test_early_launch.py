"""Programmatic dependent launch: which kernels start early, and when they let the next one start, by their source.

`tests/programs/gpu_check.py` reads from the compiled kernels that they wait before they access what others write.
"""

import ast

from tests.programs.kernel_compiler import PRODUCT, WAIT, early_kernels, functions

LETS_START = "let_next_start(is_early)"


def test_each_kernel_that_starts_early_waits_for_the_kernel_before() -> None:
    """A program that left before it waited would let a later kernel read what an earlier one still writes."""
    launched = set()
    for function in functions():
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        if "early_launch" in {ast.unparse(call.func) for call in calls}:
            names = [ast.unparse(call.func.value) for call in calls if isinstance(call.func, ast.Subscript)]
            launched |= {name.rpartition(".")[2] for name in names}
    assert launched == set(early_kernels())
    # Nothing else asks Triton for it.
    assert [path.name for path in PRODUCT.rglob("*.py") if "launch_pdl" in path.read_text()] == ["layer_kernels.py"]
    (wait,) = (function for function in functions() if function.name == WAIT.partition("(")[0])
    assert "gdc_wait" in ast.unparse(wait)


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
