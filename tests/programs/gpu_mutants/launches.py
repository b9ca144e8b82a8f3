"""Faults of launches: kernels that begin early and do not wait, and compilations while requests wait."""

from tests.programs.gpu_mutants.mutant import TESTS, Mutant

EARLY = (f"{TESTS}/test_early_launch.py", "waits")
KEYS = (f"{TESTS}/test_compile_keys.py", "int8 or bfloat16")


LAUNCH_MUTANTS = (
    # Kernels that begin before the kernel before has ended.
    Mutant(
        "a kernel that begins early and does not wait",
        "kernels",
        "    begin_early(is_early)\n    token = tl.program_id(0)",
        "    token = tl.program_id(0)",
        EARLY,
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
