"""`python -m benchmarks gpu` without a GPU: each section in a tiny form, and the program around them over scripted sections."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import every_kernel
from benchmarks.gpu.child import describe, need_gpus
from benchmarks.gpu.page import page, section_table
from benchmarks.gpu.plan import DESCRIBE_S, NAMES, SECTIONS, TOTAL_S, Section, sections_within
from benchmarks.gpu.program import CannotRun, launch_process, open_states, run_sections
from benchmarks.gpu.rank_processes import RankProcesses, group_sizes, measure_in_ranks
from benchmarks.gpu.recorder import Recorder, Unavailable, read_state, shown, waited
from benchmarks.gpu.sections import checks, memcheck
from benchmarks.gpu.sections.attention import faster_on_prompts
from benchmarks.gpu.sections.memory import verdict
from benchmarks.gpu.sections.ranks import speedups
from benchmarks.gpu.settings import Settings, add_settings, settings_of
from benchmarks.harness.common import REPOSITORY, Spread
from benchmarks.questions.gpu import main, measured, summary
from benchmarks.report.gpu import gpu
from tests.support.interpreter import interpret

TINY = Settings("cpu", "tiny", "float32", 300, True)
# What a machine for measurements may lack.
ABSENT = (
    *(
        "ray",
        "msgspec",
        "pydantic",
        "fastapi",
        "llguidance",
        "tqdm",
        "jinja2",
        "tokenizers",
        "sentencepiece",
        "tiktoken",
    ),
    *(
        "safetensors",
        "gguf",
        "fairscale",
        "hypothesis",
        "pytest_asyncio",
        "pytest_timeout",
        "rich",
        "typer",
        "yaml",
        "scipy",
    ),
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
OF_RANKS = tuple(section.name for section in SECTIONS if section.min_gpus > 1)
ELSEWHERE = ("checks", "memcheck", "transformers", "vllm", "recovery", *OF_RANKS)
RUNNABLE = [name for name in NAMES if name not in ELSEWHERE]


def run_without_libraries(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED + code, *words]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200)


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


def test_sampling_is_checked_without_hypothesis() -> None:
    """By examples of seeds: rules, masks and samples that only one token can be."""
    done = run_without_libraries("""
from tests.llama_core.execution import test_fused_sampling as checks
from tests.support.examples import has_hypothesis
assert not has_hypothesis
ops = checks.TorchOps()
checks.check_draws(ops, checks.CPU, 12), checks.check_rules(ops, checks.CPU, 12)
seen = []
checks.each_example(40, checks.cases(has_rules=True))(seen.append)()
masks, biased = (sum(map(bool, each)) for each in zip(*((any(m is not None for m in case.masks), any(
    params.logit_bias for params in case.params)) for case in seen), strict=True))
assert min(masks, biased) > 8 and len({case.logits.shape for case in seen}) > 10, (masks, biased)
""")
    assert done.returncode == 0, done.stderr


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
    record = Recorder(tmp_path / "checks.json")
    with pytest.raises(AssertionError, match=r"tests fail: \S*test_fails.py$"):
        checks.run(record, TINY)
    assert sorted(map(str, record.figures.values())) == [
        "{'failed': 1}",
        "{'lacks': 'no_such_library'}",
        "{'passed': 1}",
    ]
    monkeypatch.setattr(checks, "files_with_mark", lambda: [str(tmp_path / name) for name in list(texts)[:2]])
    without = Recorder(tmp_path / "other.json")
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
    record = Recorder(tmp_path / "checks.json")
    checks.run(record, TINY)
    name = tmp_path / "test_many.py"
    assert record.figures == {f"{name}, part {part} of 2": {"passed": 1} for part in (1, 2)}


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


def test_a_figure_is_stored_when_it_is_there_and_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    record = Recorder(path)
    record.measure("speed", lambda: Spread.of([1.0, 2.0, 3.0]))
    assert "speed: 2 ±25%" in capsys.readouterr().out
    assert read_state(path)["figures"]["speed"]["median"] == 2.0

    def fails() -> object:
        raise AssertionError("it is stored")

    again = Recorder(path)
    assert again.measure("speed", fails)["count"] == 3 and again.has("speed") and not again.has("speed", "size")
    path.write_text("{ half a fi")
    assert Recorder(path).figures == {}


def scripted(script: dict[str, list[Any]], calls: list[tuple[str, float]]) -> Any:
    """A launch whose sections do what the script says, a word a call: done, cut, dead, or a figure that is stored first."""

    def launch(name: str, path: Path, seconds: float) -> bool:
        calls.append((name, seconds))
        record = Recorder(path)
        for word in script[name].pop(0):
            if word == "done":
                record.end("done")
            elif word in ("cut", "dead"):
                return bool(word == "dead")
            else:
                record.measure(word, lambda: 1.5)
        return True

    return launch


def test_a_run_goes_on_where_it_was_cut_and_keeps_what_it_has(tmp_path: Path) -> None:
    sections = [Section("one", "One", 100), Section("two", "Two", 50), Section("three", "Three", 50)]
    calls: list[tuple[str, float]] = []
    script: dict[str, list[Any]] = {
        "one": [["a", "done"]],
        "two": [["b", "cut"], ["c", "done"]],
        "three": [["dead"], ["d", "done"]],
    }
    launch = scripted(script, calls)
    first = run_sections(sections, tmp_path, 1000, launch)
    assert [state["status"] for state in first.values()] == ["done", "cut", "failed"]
    assert "not done within 50 s" in first["two"]["reason"] and first["two"]["figures"] == {"b": 1.5}
    assert "without a word" in first["three"]["reason"]
    second = run_sections(sections, tmp_path, 1000, launch)
    assert [name for name, _ in calls] == ["one", "two", "three", "two", "three"]
    assert [state["status"] for state in second.values()] == ["done"] * 3
    assert second["two"]["figures"] == {"b": 1.5, "c": 1.5} and second["two"]["reason"] == ""
    assert dict(calls[:2]) == {"one": 100, "two": 50}


def test_sections_share_the_whole_time_and_none_starts_without(tmp_path: Path) -> None:
    sections = [Section("one", "One", 100), Section("two", "Two", 50)]
    calls: list[tuple[str, float]] = []
    launch = scripted({"one": [["done"]], "two": [["done"]]}, calls)
    found = run_sections(sections, tmp_path, 60, launch, begin=time.monotonic() - 30)
    assert calls[0][1] == pytest.approx(30, abs=1)
    late = run_sections([sections[1]], tmp_path / "other", 60, launch, begin=time.monotonic() - 58)
    assert found["two"]["status"] == "done" and late["two"]["status"] == "not run"


def test_a_section_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: Any) -> None:
    """The section waits for tests whose process waits; both are gone afterwards."""
    note = tmp_path / "pid"
    program = f"import os, time\nopen({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\n{sys.executable} -c "{program}" & wait\n')
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    launch = launch_process(TINY)
    assert launch("limits", tmp_path / "limits.json", 3.0) is False
    assert waited(lambda: not Path(f"/proc/{note.read_text()}").exists(), 5) is not None


def test_states_of_another_run_are_refused_until_fresh(tmp_path: Path) -> None:
    open_states(tmp_path, {"device": "A", "commit": "1"}, is_fresh=False)
    open_states(tmp_path, {"device": "A", "commit": "1"}, is_fresh=False)
    with pytest.raises(CannotRun, match=r"other commit.*--fresh"):
        open_states(tmp_path, {"device": "A", "commit": "2"}, is_fresh=False)
    (tmp_path / "limits.json").write_text("{}")
    open_states(tmp_path, {"device": "A", "commit": "2"}, is_fresh=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def options_for(out: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    options = parser.parse_args([*TINY.arguments, *words])
    return argparse.Namespace(**vars(options), only=None, seconds=500.0, minutes=None, fresh=False, out=out, json=None)


def test_the_result_and_the_page_have_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = options_for(tmp_path)
    assert settings_of(options) == TINY
    spread = Spread.of([2.0, 3.0, 4.0])

    def launch(name: str, path: Path, seconds: float) -> bool:
        record = Recorder(path)
        stored: dict[str, dict[str, Any]] = {
            "describe": {"device": {"device": "NVIDIA H9", "cuda": "13.0", "versions": {"torch": "2"}}},
            "decode": {
                "decode_1": {"tok_s": 100.0, "share_of_bandwidth": 0.8},
                "decode_64": {"step_ms": spread, "floor_ms": 2.0},
                "prompt": {"share_of_products": 0.7},
            },
            "offline": {"output_tok_s": 300.0},
            "transformers": {"output_tok_s": 100.0},
            "ranks": {"2_ranks_speedup": {"rows_1_ms": 1.625}},
        }
        for figure, value in stored.get(name, {"some": 1}).items():
            record.put(figure, value)
        record.end("unavailable" if name == "vllm" else "done", "vLLM is not installed" if name == "vllm" else "")
        return True

    result = measured(options, launch)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert json.loads((tmp_path / "gpu_nvidia_h9.json").read_text()) == result
    assert result["sections"].keys() == set(NAMES) and result["benchmark"] == "gpu"
    expected = {"batch_1_tok_s": 100.0, "batch_64_of_floor": 1.5, "offline_ratio": 3.0, "kill_to_token_s": None}
    assert expected.items() <= result["summary"].items()
    text = (tmp_path / "gpu_nvidia_h9.md").read_text()
    assert all(f"## {section.title}\n" in text for section in SECTIONS)
    assert "Unavailable: vLLM is not installed." in text and "Not a GPU" in text
    assert "| decode_64 | 3 ±17% | 2 |" in text and page(result) == text
    row = gpu([result]).splitlines()[-1]
    assert row.startswith("| NVIDIA H9, tiny float32 | 100 | 0.8 | 1.5 |") and row.endswith(" 1.62 |")


def test_a_page_puts_figures_with_the_same_parts_into_one_table() -> None:
    text = section_table({"a": {"ms": 1, "gb_s": 2}, "b": {"ms": 3, "gb_s": 4}, "load_s": 5.0, "c": {"us": 6}})
    assert [line for line in text.splitlines() if line.startswith("| ") and "---" not in line] == [
        *("| figure | value |", "| load_s | 5 |", "| figure | ms | gb_s |", "| a | 1 | 2 |", "| b | 3 | 4 |"),
        *("| figure | us |", "| c | 6 |"),
    ]
    assert shown({"x": [1, 2], "y": None}) == "x 1, 2, y -"


def test_nothing_measured_gives_a_summary_of_nothing() -> None:
    empty: dict[str, dict[str, Any]] = {name: {"figures": {}} for name in NAMES}
    assert set(summary(empty)["summary"].values()) == {None}


def test_the_sections_take_about_half_an_hour() -> None:
    on_one = sum(section.budget_s for section in SECTIONS if section.min_gpus == 1)
    assert TOTAL_S == 1800 and on_one < 1.3 * TOTAL_S
    assert len(set(NAMES)) == len(NAMES)
    for name in NAMES:
        assert (REPOSITORY / "benchmarks" / "gpu" / "sections" / f"{name}.py").exists(), name


def test_a_run_of_13_minutes_has_what_matters_most_first_in_shorter_forms() -> None:
    sections = sections_within(13)
    assert [section.name for section in sections] == [
        *("checks", "invariance", "memcheck", "offline", "transformers", "attention", "loading", "memory", "recovery")
    ]
    assert next(section.budget_s for section in sections if section.name == "memcheck") >= 110
    assert DESCRIBE_S + sum(section.budget_s for section in sections) <= 13 * 60
    # As many as fit; the last one may be cut, and goes on in the next call.
    assert [section.name for section in sections_within(5)] == ["checks", "invariance", "memcheck"]
    for minutes in (1, 3, 7, 11):
        assert sum(section.budget_s for section in sections_within(minutes)) <= 60 * minutes
    assert sections_within(30) == SECTIONS
    short = Settings(is_short=True)
    assert set(short.sizes.rows) < set(Settings().sizes.rows) and short.sizes.repeats < Settings().sizes.repeats
    parser = argparse.ArgumentParser()
    add_settings(parser)
    assert settings_of(parser.parse_args(short.arguments)) == short


@pytest.mark.parametrize(("minutes", "seconds", "is_short"), [("13", 780, True), ("40", TOTAL_S, False)])
def test_minutes_choose_sections_and_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: str, seconds: int, is_short: bool
) -> None:
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr("benchmarks.questions.gpu.measured", lambda options, launch: seen.append(options))
    main(["--minutes", minutes, "--out", str(tmp_path)])
    assert (seen[0].seconds, settings_of(seen[0]).is_short) == (seconds, is_short)


def test_without_a_device_the_program_ends_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(Unavailable, match="no CUDA device"):
        describe(Settings())

    def launch(name: str, path: Path, seconds: float) -> bool:
        Recorder(path).end("unavailable", "torch sees no CUDA device")
        return True

    monkeypatch.setattr("benchmarks.questions.gpu.launch_process", lambda settings: launch)
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path)])
    assert ended.value.code == 2 and "no CUDA device" in capsys.readouterr().err


# In each run, the sections run in one process above, and the program over scripted sections below.
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


@pytest.mark.full
def test_sections_of_several_gpus_run_in_processes_that_gloo_joins(tmp_path: Path) -> None:
    words = [*TINY.arguments, "--out", str(tmp_path), "--only", *OF_RANKS]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    sections = {name: part["figures"] for name, part in json.loads(done.stdout.splitlines()[-1])["sections"].items()}
    sums = sections["all_reduce"]
    assert (
        sums["2_ranks_nccl_64"].keys() == {"rows_1_us", "rows_3_us"} and "  2_ranks_nccl_96: rows_1_us" in done.stdout
    )
    assert sums["2_ranks_one_shot_64"] == "all_reduce one_shot cannot be used: the ranks have no GPUs"
    ranks = sections["ranks"]
    assert ranks["2_ranks_speedup"]["rows_2_ms"] == pytest.approx(
        ranks["1_rank"]["rows_2_ms"] / ranks["2_ranks_nccl"]["rows_2_ms"], rel=1e-4
    )
    lost = sections["rank_loss"]["nccl"]
    assert 0 < lost["memory_free_s"] <= lost["survivor_gone_s"] < 60
    same = {"texts": 8, "same": 8, "first_difference": -1}
    assert sections["rank_texts"].keys() == {
        *(f"{what}_on_{count}" for what in ("twice", "alone_and_in_a_batch") for count in (1, 2)),
        "1_against_2_ranks",
    }
    assert sections["rank_texts"]["twice_on_1"] == sections["rank_texts"]["twice_on_2"] == same


def test_what_ranks_have_measured_is_not_measured_again(tmp_path: Path) -> None:
    record = Recorder(tmp_path / "all_reduce.json")
    record.put("2_ranks_nccl_64", "stored")
    measure_in_ranks(record, TINY, "all_reduce", 2)
    assert record.figures["2_ranks_nccl_64"] == "stored" and len(record.figures) == 6


def test_a_rank_that_fails_ends_the_others_and_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot read its arguments, and rank 0 waits for it, without importing torch."""
    waiting = [sys.executable, "-I", "-c", "import time; time.sleep(60)"]
    begun: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def fails(command: list[str], **options: Any) -> Any:
        process = start(waiting if command[4] == "0" else [*command, "--no-such-option"], **options)
        begun.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", fails)
    with pytest.raises(RuntimeError, match="rank 1 ended with status 2"), RankProcesses("decode", 2, TINY) as ranks:
        list(ranks.figures())
    assert [process.poll() is not None for process in begun] == [True, True]


def test_one_gpu_is_too_few_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    need_gpus(1, Settings())
    with pytest.raises(Unavailable, match="it needs 2 GPUs, torch sees 1"):
        need_gpus(2, Settings())
    need_gpus(2, TINY)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 6)
    assert group_sizes(Settings()) == [2, 4] and group_sizes(TINY) == [2]


def test_the_fastest_way_counts_and_refused_ones_do_not() -> None:
    figures = {"1_rank": {"rows_1_ms": 6.0}, "a": {"rows_1_ms": 4.0}, "b": {"rows_1_ms": 3.0}, "c": "cannot be used"}
    assert speedups(figures, ["a", "b", "c"]) == {"rows_1_ms": 2.0}


def test_memory_within_three_percent_of_the_plan_passes() -> None:
    assert [verdict(taken, 1000) for taken in (969, 970, 1030, 1031)] == ["no", "yes", "yes", "no"]
