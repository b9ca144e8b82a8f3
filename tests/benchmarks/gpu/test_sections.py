"""The sections of `python -m benchmarks gpu` in a tiny form, on the CPU."""

from pathlib import Path

from benchmarks.gpu.recorder import read_run
from tests.benchmarks.gpu.tiny_sections import TINY, run_without_libraries

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
