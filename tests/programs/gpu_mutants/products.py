"""Faults of products with epilogues."""

from tests.programs.gpu_mutants.mutant import TESTS, Mutant

PRODUCTS = (f"{TESTS}/test_fused_products.py", "tile_and_split")
CHOICE = (f"{TESTS}/test_fused_products.py", "few_rows")


PRODUCT_MUTANTS = (
    Mutant(
        "a gate in the place of its up",
        "product_kernels",
        "of_hidden + index % 2 * hidden,",
        "of_hidden + (1 - index % 2) * hidden,",
        PRODUCTS,
    ),
    Mutant(
        "sums of gate and up that are not rounded",
        "product_kernels",
        "tl.reshape(acc.to(out.dtype.element_ty), ",
        "tl.reshape(acc, ",
        PRODUCTS,
    ),
    Mutant(
        "rows beyond the step's that are written",
        "product_kernels",
        "    inside = (row < rows)[:, None] & (output < outputs)[None, :]\n    target",
        "    inside = (row < rows + 1)[:, None] & (output < outputs)[None, :]\n    target",
        PRODUCTS,
    ),
    Mutant(
        "sums of a split over those of another",
        "product_kernels",
        "tl.program_id(2).to(tl.int64) * rows * outputs + target",
        "target",
        PRODUCTS,
    ),
    Mutant(
        "inputs that two splits share",
        "product_kernels",
        "tl.minimum(begin + split, width)",
        "tl.minimum(begin + split + 1, width)",
        PRODUCTS,
    ),
    Mutant("the last split's sums that are not added", "kernels", "(1, num_splits)", "(1, num_splits - 1)", PRODUCTS),
    Mutant(
        "a bias that is lost with the splits",
        "kernels",
        "partial, weight, eps, bias, num_splits",
        "partial, weight, eps, None, num_splits",
        PRODUCTS,
    ),
    Mutant("the scale of the group before", "../weight_formats/tile_kernels", "first // width +", "0 +", PRODUCTS),
    Mutant("a fused product where bits are promised", "kernels", "never if batch_invariant else ", "", PRODUCTS),
    Mutant("fused products of more rows", "product_choice", "rows <= MOST_ROWS and ", "", CHOICE),
)
