"""Sections that check instead of measuring: the tests marked cuda, and every kernel under compute-sanitizer."""

import os
from pathlib import Path

import pytest

from benchmarks.gpu import every_kernel
from benchmarks.gpu.recorder import Recorder, Unavailable
from benchmarks.gpu.sections import checks, memcheck
from tests.benchmarks.gpu.tiny_sections import TINY, run_without_libraries
from tests.support.interpreter import interpret


def test_the_tests_marked_cuda_are_collected_without_these_libraries() -> None:
    """But for those of the reference's API, which has a tokenizer."""
    files = [file for file in checks.files_with_mark() if not file.endswith("/test_generation.py")]
    assert "tests/llama_core/execution/test_fused_sampling.py" in files
    assert {"tests/llama_core/execution/test_gpu.py", "tests/llama_core/execution/test_fused_attention.py"} <= set(
        files
    )
    assert not [file for file in files if file.startswith("tests/benchmarks/")], "none of these has a test for a GPU"
    words = ["-c", str(checks.CONFIGURATION), "--rootdir", ".", "--noconftest", "-m", "cuda", *files]
    done = run_without_libraries("import pytest\nsys.exit(pytest.main(sys.argv[1:]))", *words)
    assert done.returncode == 0 and " skipped" in done.stdout and "error" not in done.stdout.lower(), done.stdout


def test_a_test_module_that_lacks_a_library_is_named_and_a_failing_one_fails_the_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "test_lacks.py": "import no_such_library",
        "test_passes.py": "import pytest\n@pytest.mark.cuda\ndef test_a():\n    pass\ndef test_b():\n    assert 0",
        "test_fails.py": "import pytest\n@pytest.mark.cuda\ndef test_a():\n    assert 0",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(checks, "files_with_mark", lambda: [str(tmp_path / name) for name in texts])
    record = Recorder(tmp_path / "run.json", "checks")
    with pytest.raises(AssertionError, match=r"tests fail: \S*test_fails.py$"):
        checks.run(record, TINY)
    assert sorted(map(str, record.figures.values())) == [
        "{'failed': 1}",
        "{'lacks': 'no_such_library'}",
        "{'passed': 1}",
    ]
    monkeypatch.setattr(checks, "files_with_mark", lambda: [str(tmp_path / name) for name in list(texts)[:2]])
    without = Recorder(tmp_path / "other.json", "checks")
    assert checks.run(without, TINY) == f"not run: {tmp_path / 'test_lacks.py'} lacks no_such_library"


def test_parts_of_a_module_are_its_tests_and_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two waits for the other, so that one after the other they would fail."""
    (tmp_path / "test_many.py").write_text("""import pathlib, pytest, time
@pytest.mark.parametrize("mine", (0, 1))
def test_both(mine):
    here = pathlib.Path(__file__).parent
    (here / str(mine)).touch()
    end = time.monotonic() + 60
    while not (here / str(1 - mine)).exists():
        assert time.monotonic() < end
        time.sleep(0.02)
pytestmark = pytest.mark.cuda
""")
    monkeypatch.setattr(checks, "files_with_mark", lambda: [str(tmp_path / "test_many.py")])
    monkeypatch.setattr(checks, "_PARTS", {"test_many.py": 2})
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    record = Recorder(tmp_path / "run.json", "checks")
    checks.run(record, TINY)
    name = tmp_path / "test_many.py"
    assert record.figures == {f"{name}, part {part} of 2": {"passed": 1} for part in (1, 2)}


@pytest.mark.full
def test_every_kernel_of_the_source_is_launched_for_memcheck() -> None:
    """In Triton's interpreter. A new kernel belongs into `benchmarks.gpu.every_kernel`, and into a test marked cuda."""
    in_source = every_kernel.kernels_in_source()
    assert {"_attend", "_combine_splits", "_multiply", "_add_norm", "_rotate_and_store", "_gated_silu"} <= in_source
    printed = interpret("import runpy\nrunpy.run_module('benchmarks.gpu.every_kernel', run_name='__main__')", "cpu")
    assert {line.removeprefix("kernel ") for line in printed.splitlines()} == in_source


def test_memcheck_is_unavailable_where_compute_sanitizer_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(memcheck, "_PLACES", ())
    with pytest.raises(Unavailable, match="compute-sanitizer"):
        memcheck.command()
    monkeypatch.setattr("shutil.which", lambda name: "/cuda/compute-sanitizer")
    assert memcheck.command()[:3] == ["/cuda/compute-sanitizer", "--tool", "memcheck"]
