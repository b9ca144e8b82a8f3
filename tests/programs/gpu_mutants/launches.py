"""Faults of launches: kernels that start early and do not wait, and compilations while requests wait."""

from tests.programs.gpu_mutants.mutant import TESTS, Mutant

EARLY = (f"{TESTS}/test_early_launch.py", "waits")
KEYS = (f"{TESTS}/test_compile_keys.py", "int8 or bfloat16")


LAUNCH_MUTANTS = (
    # Kernels that start before the kernel before has ended.
    Mutant(
        "a kernel that starts early and does not wait",
        "kernels",
        "    wait_for_previous(is_early)\n    total = n_heads",
        "    total = n_heads",
        EARLY,
    ),
    Mutant(
        "a norm that reads the hidden states before it waits",
        "kernels",
        "    wait_for_previous(is_early)\n    let_next_start(is_early)\n"
        "    x = tl.load(hidden_states + row + column, mask=inside, other=0.0)\n",
        "    x = tl.load(hidden_states + row + column, mask=inside, other=0.0)\n"
        "    wait_for_previous(is_early)\n    let_next_start(is_early)\n",
        EARLY,
    ),
    Mutant(
        "a product that starts beside the product before",
        "product_kernels",
        "    wait_for_previous(is_early)\n    block_hidden",
        "    wait_for_previous(is_early)\n    let_next_start(is_early)\n    block_hidden",
        (f"{TESTS}/test_early_launch.py", "product"),
    ),
    # Compilations while requests wait.
    Mutant("a step whose tiles are aligned to 8 bytes", "step_plan", "return count + count % 2", "return count", KEYS),
    Mutant(
        "a product that is compiled for a number of rows",
        "../weight_formats/kernels",
        '@triton.jit(do_not_specialize=["rows"])',
        "@triton.jit",
        KEYS,
    ),
)
