"""Sections that check instead of measuring: the tests marked cuda, and every kernel."""

import pytest

from benchmarks.gpu import every_kernel
from benchmarks.gpu.sections import checks
from tests.benchmarks.gpu.tiny_sections import run_without_libraries
from tests.support.forking import interpret


def test_the_tests_marked_cuda_are_collected_without_these_libraries() -> None:
    """But for those of the reference's API, which has a tokenizer."""
    files = [file for file in checks.files_with_mark() if not file.endswith("/test_generation.py")]
    assert "tests/llama_core/backends/fused/test_fused_sampling.py" in files
    assert {
        "tests/llama_core/backends/fused/test_gpu.py",
        "tests/llama_core/backends/fused/test_fused_attention.py",
    } <= set(files)
    assert not [file for file in files if file.startswith("tests/benchmarks/")], "none of these has a test for a GPU"
    words = ["-c", str(checks.CONFIGURATION), "--rootdir", ".", "--noconftest", "-m", "cuda", *files]
    done = run_without_libraries("import pytest\nsys.exit(pytest.main(sys.argv[1:]))", *words)
    assert done.returncode == 0 and " skipped" in done.stdout and "error" not in done.stdout.lower(), done.stdout


@pytest.mark.full
def test_every_kernel_of_the_source_is_launched_for_memcheck() -> None:
    """In Triton's interpreter. A new kernel belongs into `benchmarks.gpu.every_kernel`, and into a test marked cuda."""
    in_source = every_kernel.kernels_in_source()
    assert {"_attend", "_combine_splits", "_multiply", "_add_norm", "_rotate_and_store", "_gated_silu"} <= in_source
    printed = interpret("import runpy\nrunpy.run_module('benchmarks.gpu.every_kernel', run_name='__main__')", "cpu")
    assert {line.removeprefix("kernel ") for line in printed.splitlines()} == in_source
