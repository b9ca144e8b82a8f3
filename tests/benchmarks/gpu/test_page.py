"""The result of a run as JSON, as a page, and as a row of the report."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.page import page, section_table
from benchmarks.gpu.plan import NAMES, SECTIONS
from benchmarks.gpu.recorder import Recorder, shown
from benchmarks.gpu.settings import add_settings, settings_of
from benchmarks.harness.common import Spread
from benchmarks.questions.gpu import measured, summary
from benchmarks.report.gpu import gpu
from tests.benchmarks.gpu.tiny_sections import TINY


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
    assert row.startswith("| NVIDIA H9, tiny float32 | 100 | 0.8 | 1.5 | 0.7 | 300 | 3 |") and row.endswith(" 1.62 |")


def test_a_peer_that_did_not_end_gives_a_lower_bound_of_the_ratio() -> None:
    sections: dict[str, dict[str, Any]] = {name: {"figures": {}} for name in NAMES}
    sections["offline"] = {"figures": {"output_tok_s": 300.0}}
    sections["transformers"] = {"figures": {"seconds": "more than 45", "output_tok_s_at_most": 50.0}}
    result = {"device": "NVIDIA H9", "settings": {"shape": "tiny", "dtype": "float32"}, **summary(sections)}
    assert result["summary"]["offline_ratio"] is None
    assert "| 300 | at least 6 |" in gpu([result])


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
