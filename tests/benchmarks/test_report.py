"""The tables of the performance page: made from results, one for each marker, without changes to other text."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import PAGE, RESULTS, TABLES, fill, main, read_results

SPREAD = {"median": 2.0, "low": 1.9, "high": 2.1, "least": 1.5, "most": 2.5, "count": 5}
MACHINE = {
    **{"cpu": "A Processor", "cpu_family_model": "6/207", "cores": 2, "flags": ["avx2"], "caches_bytes": {"L2": 2**21}},
    **{"memory_bytes": 2**34, "system": "Linux", "versions": {"torch": "2"}, "commit": "abc"},
}
FIGURES = ("prefill_tok_s", "gflop_s", "matmul_gflop_s", "share_of_matmul")


def result(benchmark: str, **fields: Any) -> dict[str, Any]:
    return {"benchmark": benchmark, "date": "2026-11-21", "machine": MACHINE, "model": "m", "weights": "w", **fields}


MADE = [
    result(
        "paired",
        question="online",
        dtype="bfloat16",
        concurrency="8",
        first="ours-http",
        contenders={name: {"ttft_p50_ms": SPREAD} for name in ("ours-http", "other")},
        ratios={"other": {"ttft_p50_ms": {"ratio": SPREAD, "lower_is_better": True}}},
    ),
    result("prefill", cases={"bfloat16": dict.fromkeys(FIGURES, SPREAD)}),
]


def test_the_page_has_one_marker_for_each_table_and_matches_the_results() -> None:
    page = PAGE.read_text()
    opened, closed = (re.findall(rf"<!-- {slash}([\w][\w/]+) -->", page) for slash in ("", "/"))
    assert opened == closed and len(opened) == len(set(opened))
    assert {marker for marker in opened if "/" not in marker} == set(TABLES)
    assert fill(page, read_results(RESULTS)) == page


def test_filling_a_page_replaces_tables_and_keeps_the_text() -> None:
    page = "Before.\n<!-- online -->\nold\n<!-- /online -->\nAfter.\n"
    filled = fill(page, MADE)
    assert [line for line in filled.splitlines() if line.endswith(".")] == ["Before.", "After."]
    (row,) = [re.split(r" *\| *", line) for line in filled.splitlines() if "ours-http" in line]
    assert row[1:-1] == [
        *("m bfloat16, 8: ours-http / other", "-", "**2.00** (1.50..2.50)", "-", "-", "-"),
    ]
    assert fill(filled, MADE) == filled
    with pytest.raises(KeyError, match="nothing_of_the_kind"):
        fill("<!-- nothing_of_the_kind -->\n<!-- /nothing_of_the_kind -->", [])


def test_results_in_a_folder_fill_the_tables_of_that_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "avx2").mkdir()
    (tmp_path / "here.json").write_text(json.dumps(MADE[0] | {"model": "one"}))
    (tmp_path / "avx2" / "there.json").write_text(json.dumps(MADE[0] | {"model": "two"}))
    page = "<!-- online -->\n<!-- /online -->\n<!-- avx2/online -->\n<!-- /avx2/online -->\n"
    first, second = fill(page, read_results(tmp_path)).split("<!-- avx2/online -->")
    assert "| one bfloat16" in first and "| two" not in first
    assert "| two bfloat16" in second and "| one" not in second


def test_the_command_fills_the_page_from_a_folder_of_results(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(MADE))
    (tmp_path / "b.json").write_text(json.dumps({"benchmark": "another page's", "machine": "in words"}))
    page = tmp_path / "page.md"
    page.write_text("<!-- prefill -->\n<!-- /prefill -->\n")
    main(["--results", str(tmp_path), "--page", str(page)])
    assert "m, bfloat16" in page.read_text()
