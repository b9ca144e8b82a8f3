"""The sections of `python -m benchmarks gpu` in a tiny form, on the CPU."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.recorder import read_run
from benchmarks.gpu.sections.memory import verdict
from benchmarks.gpu.settings import Settings, add_settings, settings_of
from benchmarks.harness.common import REPOSITORY
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


def test_settings_reach_the_process_of_a_section() -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    other = Settings(quantization="int4", kv_cache_dtype="fp8", temperature=0.5, shape="llama-3-8b", vocab_size=128256)
    for settings in (TINY, other):
        assert settings_of(parser.parse_args(settings.arguments)) == settings


# In each run, the sections run in one process above, and the program over scripted sections in test_program.py.
@pytest.mark.full
def test_the_command_runs_sections_in_processes(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run.json"), "--only", "recovery"]
    command = [sys.executable, "-m", "benchmarks", "gpu", *TINY.arguments, *out]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    figures = result["sections"]["recovery"]["figures"]
    assert result["device"] == "cpu"
    assert figures["kill_to_token_s"] >= figures["next_load_s"] and "  load_s: " in done.stdout
    assert figures["beyond_load_s"] == pytest.approx(figures["kill_to_token_s"] - figures["load_s"])
    for start in (figures["start"], figures["next_start"]):
        assert start["load_s"] > 0 and start["cache_s"] > 0 and start.keys() >= {"warm_up_s", "capture_s", "left_s"}


def test_memory_within_three_percent_of_the_plan_passes() -> None:
    assert [verdict(taken, 1000) for taken in (969, 970, 1030, 1031)] == ["no", "yes", "yes", "no"]
