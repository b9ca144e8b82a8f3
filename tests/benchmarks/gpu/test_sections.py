"""The sections of `python -m benchmarks gpu` in a tiny form, on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.plan import NAMES
from benchmarks.gpu.recorder import read_state
from benchmarks.gpu.sections.attention import faster_on_prompts
from benchmarks.gpu.sections.memory import verdict
from benchmarks.harness.common import REPOSITORY
from tests.benchmarks.gpu.tiny_sections import ELSEWHERE, TINY, run_without_libraries

RUNNABLE = [name for name in NAMES if name not in ELSEWHERE]


def test_every_section_runs_without_ray_and_the_other_libraries_of_the_server(tmp_path: Path) -> None:
    """In one process, on the CPU, with tiny sizes: what a run on a GPU executes."""
    code = f"""
import importlib
from pathlib import Path
from benchmarks.gpu.rank_processes import RankProcesses, group_sizes, measure_in_ranks
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings
import benchmarks.gpu.child, benchmarks.gpu.program, benchmarks.questions.gpu
settings = Settings("cpu", "tiny", "float32", 300, True)
for name in {RUNNABLE!r}:
    record = Recorder(Path(sys.argv[1]) / f"{{name}}.json")
    module = importlib.import_module(f"benchmarks.gpu.sections.{{name}}")
    module.run(record, settings)
    record.end("done")
    before = record.figures
    again = Recorder(Path(sys.argv[1]) / f"{{name}}.json")
    if name not in ("memory",):
        module.run(again, settings)
        assert again.figures == before, name
for name in {ELSEWHERE!r}:
    importlib.import_module(f"benchmarks.gpu.sections.{{name}}")
importlib.import_module("benchmarks.gpu.rank")
"""
    done = run_without_libraries(code, str(tmp_path))
    assert done.returncode == 0, done.stderr
    figures = {name: read_state(tmp_path / f"{name}.json")["figures"] for name in RUNNABLE}
    assert figures["decode"]["decode_2"].keys() == {"context", "step_ms", "tok_s", "floor_ms", "share_of_bandwidth"}
    assert figures["decode"]["prompt"]["share_of_products"] > 0
    assert figures["memory"]["planned_bytes"]["cache"] > 0 and figures["kernels"]["sampled_2"]["launches"] > 50
    assert figures["attention"]["2_rows_of_40"]["gb_s"]["median"] > 0
    assert figures["attention"]["2_rows_of_40_in_400"]["gb_s"]["median"] > 0
    assert figures["mixed"]["decodes_and_a_prompt"]["host_us"]["median"] > 0
    assert figures["mixed"]["decodes_with_masks"]["samples_us"]["median"] > 0
    assert figures["offline"]["output_tok_s"] > 0
    assert figures["loading"].keys() == {"mapped", "mapped_one_thread", "threads_1", "threads_2"}
    assert figures["loading"]["threads_2"]["gb_s"]["median"] > 0
    assert figures["invariance"]["twice"] == {"texts": 8, "same": 8, "first_difference": -1}


def test_flash_attention_is_compared_on_prompts_alone() -> None:
    def figures(ours: float, theirs: float) -> dict[str, Any]:
        return {
            "1_rows_of_512": {"ms": 9.0},
            "chunk_of_512_at_0": {"ms": {"median": ours}},
            "flash_attention_2_chunk_of_512_at_0": {"ms": {"median": 2.0}},
            "chunk_of_512_at_512": {"ms": 3.0},
            "flash_attention_2_chunk_of_512_at_512": {"ms": theirs},
            "chunk_of_512_at_900": {"ms": 1.0},
            "flash_attention_2_chunk_of_512_at_900": {"lacks": "this GPU"},
        }

    found = faster_on_prompts(figures(4.0, 1.0))
    assert found.pop("faster_on_prompts") == "FlashAttention 2" and list(found.values()) == [2.0, 3.0]
    assert faster_on_prompts(figures(1.0, 4.0))["faster_on_prompts"] == "ours"
    assert faster_on_prompts(figures(1.0, 2.0))["faster_on_prompts"] == "depends on the length"
    assert faster_on_prompts({"chunk_of_512_at_0": {"ms": 1.0}}) == {}


# In each run, the sections run in one process above, and the program over scripted sections in test_program.py.
@pytest.mark.full
def test_the_command_runs_sections_in_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "gpu", *TINY.arguments, "--out", str(tmp_path), "--only", "recovery"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    figures = result["sections"]["recovery"]["figures"]
    assert result["sections"]["limits"]["status"] == "not run" and result["device"] == "cpu"
    assert figures["kill_to_token_s"] >= figures["next_load_s"] and "  load_s: " in done.stdout
    assert figures["beyond_load_s"] == pytest.approx(figures["kill_to_token_s"] - figures["load_s"])
    for start in (figures["start"], figures["next_start"]):
        assert start["load_s"] > 0 and start["cache_s"] > 0 and start.keys() >= {"warm_up_s", "capture_s", "left_s"}


def test_memory_within_three_percent_of_the_plan_passes() -> None:
    assert [verdict(taken, 1000) for taken in (969, 970, 1030, 1031)] == ["no", "yes", "yes", "no"]
