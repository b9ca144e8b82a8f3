"""Intervals, commands and lines of JSON."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks.harness.common import (
    REPOSITORY,
    Spread,
    command_line,
    emit,
    interval,
    last_json,
    number,
    percentile,
    print_table,
    public,
    shown,
)


def test_a_percentile_is_interpolated_between_neighbouring_ranks() -> None:
    assert [percentile([4, 1, 3, 2], percent) for percent in (0, 50, 100)] == [1, 2.5, 4]
    assert percentile([7], 99) == 7
    assert percentile(list(range(101)), 99) == 99


def test_a_spread_does_not_depend_on_the_order_of_its_values() -> None:
    spread = Spread.of([9, 1, 5, 3, 7])
    assert (spread.median, spread.low, spread.high, spread.least, spread.most, spread.count) == (5, 3, 7, 1, 9, 5)
    assert spread.relative == pytest.approx(0.4)
    assert str(spread) == "5 ±40%"
    assert str(Spread.of([0.5])) == "0.5"


def test_numbers_in_tables_have_three_significant_digits() -> None:
    assert [number(value) for value in (None, "x", 12345, 12345.6, 123.456, 12.3456, 0.00123456)] == [
        *("-", "x", "12,345", "12,346", "123", "12.3", "0.00123")
    ]


def test_a_table_is_markdown_as_wide_as_its_widest_cell(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Title", ["who", "figure"], [("a long name", 1.5), ("b", None)])
    assert capsys.readouterr().out.splitlines() == [
        *("", "Title", "", "| who         | figure |", "|-------------|-------:|"),
        *("| a long name |    1.5 |", "| b           |      - |"),
    ]
    spread = {"median": 2.0, "low": 1.9, "high": 2.1, "least": 1.5, "most": 2.5, "count": 5}
    assert shown({"a": spread, "b": [1, None]}) == "a 2 ±5%, b 1, -"


def test_an_interval_of_95_percent_is_students() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found["mean"] == 3 and found["count"] == 5
    assert found["high"] + found["low"] == pytest.approx(6)
    assert found["high"] - 3 == pytest.approx(2.776 * 1.5811 / 5**0.5, rel=0.02)


def test_the_last_line_is_the_result_with_its_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    print("a table")
    options = argparse.Namespace(json=tmp_path / "result.json")
    emit("name", {"figure": Spread.of([1 / 3]), "path": tmp_path / "deep" / "down"}, options)
    result = last_json(capsys.readouterr().out + "a log line of somebody else's\n")
    assert result == json.loads(options.json.read_text())
    assert result["figure"]["median"] == 0.333333
    assert str(tmp_path) not in result["path"]
    assert {"cpu", "cores", "flags", "versions", "commit", "load_average"} <= result["machine"].keys()
    assert {"benchmark", "command", "date"} <= result.keys()
    with pytest.raises(ValueError, match="no line of JSON"):
        last_json("nothing\n[1]\n")


def test_a_result_has_the_command_that_repeats_it_without_local_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = str(REPOSITORY / "benchmarks" / "peers" / "vllm_driver.py")
    monkeypatch.setattr(sys, "argv", [inside, "--ckpt", "/home/me/models/llama-110m/meta", "a b"])
    assert command_line() == "python -m benchmarks.peers.vllm_driver --ckpt .../llama-110m/meta 'a b'"
    monkeypatch.setattr(sys, "argv", [str(REPOSITORY / "benchmarks" / "__main__.py"), "decode", "--repeats", "1"])
    assert command_line() == "python -m benchmarks decode --repeats 1"
    assert public(str(REPOSITORY / "demo")) == "demo"
    assert public("/usr/lib/a/libx.so:/opt/b/c/liby.so") == ".../a/libx.so:.../c/liby.so"
