"""The sections of `python -m benchmarks gpu` in a tiny form on the CPU, and those that check instead of measuring."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import every_kernel
from benchmarks.gpu.recorder import read_run
from benchmarks.gpu.sections import checks
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY
from tests.support.forking import interpret

FUSED = "tests/llama_core/backends/fused"
TINY = Settings("cpu", "tiny", "float32", vocab_size=300, is_tiny=True)
# What a machine for measurements may lack.
ABSENT = (
    *("ray", "msgspec", "pydantic", "fastapi", "llguidance", "tqdm", "jinja2"),
    *("tokenizers", "sentencepiece", "tiktoken", "safetensors", "gguf", "fairscale"),
    *("hypothesis", "pytest_asyncio", "pytest_timeout", "rich", "typer", "yaml", "scipy"),
)
BLOCKED = f"""
import sys
from importlib.machinery import PathFinder
class Fewer:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT!r} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Fewer
"""


def run_without_libraries(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that cannot import ABSENT."""
    command = [sys.executable, "-c", BLOCKED + code, *words]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200)


# The sections of `python -m benchmarks gpu` in a tiny form, on the CPU.


RUNNABLE = ("decode", "offline", "mixed", "memory", "invariance", "loading", "attention")


def test_every_section_runs_without_ray_and_the_other_libraries_of_the_server(tmp_path: Path) -> None:
    """In one process, on the CPU, with tiny sizes: what a run on a GPU executes."""
    code = f"""
import importlib
from pathlib import Path
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
import benchmarks.gpu.child, benchmarks.questions.gpu
for name in {RUNNABLE!r}:
    module = importlib.import_module(f"benchmarks.gpu.sections.{{name}}")
    for turn in range(2):  # the second measures nothing again
        record = Recorder(Path(sys.argv[1]), name)
        before = record.figures
        if not turn or name != "memory":
            module.run(record, {TINY!r})
        assert not turn or record.figures == before, name
for name in ("checks", "memcheck", "recovery"):
    importlib.import_module(f"benchmarks.gpu.sections.{{name}}")
"""
    done = run_without_libraries(code, str(tmp_path / "run.json"))
    assert done.returncode == 0, done.stderr
    sections = read_run(tmp_path / "run.json")["sections"]
    figures = {name: sections[name]["figures"] for name in RUNNABLE}
    assert figures["decode"]["decode_2"].keys() == {"context", "step_ms", "tok_s", "floor_ms", "share_of_bandwidth"}
    assert figures["decode"]["prompt"]["share_of_products"] > 0
    assert figures["memory"]["planned_bytes"]["cache"] > 0
    assert figures["attention"]["2_rows_of_40"]["gb_s"]["median"] > 0
    assert figures["attention"]["2_rows_of_40_in_400"]["gb_s"]["median"] > 0
    assert figures["mixed"]["decodes_and_a_prompt"]["host_us"]["median"] > 0
    assert figures["offline"]["output_tok_s"] > 0
    assert figures["loading"]["threads_2"]["gb_s"]["median"] > 0
    assert figures["invariance"]["twice"] == {"texts": 8, "same": 8, "first_difference": -1}


# Sections that check instead of measuring: the tests marked cuda, and every kernel.


def test_the_tests_marked_cuda_are_collected_without_these_libraries() -> None:
    """But for those of the reference's API, which has a tokenizer."""
    files = [file for file in checks.files_with_mark() if not file.endswith("/test_generation.py")]
    assert f"{FUSED}/test_fused_sampling.py" in files
    assert {f"{FUSED}/test_gpu.py", f"{FUSED}/test_fused_attention.py"} <= set(files)
    assert not [file for file in files if file.startswith("tests/benchmarks/")], "none of these has a test for a GPU"
    words = ["-c", str(checks.CONFIGURATION), "--rootdir", ".", "--noconftest", "-m", "cuda", *files]
    done = run_without_libraries("import pytest\nsys.exit(pytest.main(sys.argv[1:]))", *words)
    assert done.returncode == 0 and " skipped" in done.stdout and "error" not in done.stdout.lower(), done.stdout


@pytest.mark.full
def test_every_kernel_of_the_source_is_launched_for_memcheck() -> None:
    """In Triton's interpreter. A new kernel belongs into `benchmarks.gpu.every_kernel`, and into a test marked cuda."""
    in_source = every_kernel.kernels_in_source()
    assert {"_attend", "_combine_splits", "_multiply", "_add_norm", "_rotate_and_store", "_gate"} <= in_source
    printed = interpret("import runpy\nrunpy.run_module('benchmarks.gpu.every_kernel', run_name='__main__')", "cpu")
    assert {line.removeprefix("kernel ") for line in printed.splitlines()} == in_source
