"""The plot depends on the results only."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="matplotlib comes with the extra named bench")

from benchmarks.report.plot import OTHER, by_kind, draw, ratios_of


def spread(median: float, least: float, most: float) -> dict[str, float]:
    return {"median": median, "least": least, "most": most}


def step(rows: int) -> dict[str, Any]:
    parts = [("gate and up", 2.0, 1.8), ("attend", 0.5, 0.2), ("norm at the end", 0.01, 0.0), ("logits", 1.0, 0.9)]
    return {
        "rows": rows,
        "parts": [{"part": part, "ms": spread(ms, ms, ms), "least_ms": least} for part, ms, least in parts],
    }


STEP = {"benchmark": "step", "model": "llama-110m", "weights": "bfloat16", "cases": [step(1), step(8)]}
PAIRED = {
    **{"benchmark": "paired", "question": "online", "model": "llama-110m", "dtype": "bfloat16", "concurrency": "8"},
    "first": "ours",
    "ratios": {
        "other": {
            "output_tok_s": {"ratio": spread(1.5, 1.4, 1.6), "lower_is_better": False},
            "ttft_p50_ms": {"ratio": spread(0.5, 0.4, 0.8), "lower_is_better": True},
        }
    },
}


def test_every_part_of_a_step_is_plotted_by_its_kind() -> None:
    kinds = by_kind(STEP["cases"][0]["parts"], "ms")  # type: ignore[index]
    assert kinds["feed-forward"] == 2.0
    assert kinds[OTHER] == 0.01
    assert sum(kinds.values()) == pytest.approx(3.51)


def test_a_ratio_is_inverted_where_less_is_better() -> None:
    (rate, *_), (time, ratio, least, most) = ratios_of([PAIRED])
    assert "output" in rate
    assert "ttft_p50" in time
    assert (ratio, least, most) == (2.0, 1.25, 2.5)


def test_the_same_results_give_the_same_plot(tmp_path: Path) -> None:
    draw([STEP, PAIRED], tmp_path / "one.svg")
    draw([STEP, PAIRED], tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    draw([PAIRED], tmp_path / "ratios.svg")
    with pytest.raises(ValueError, match="no result"):
        draw([{"benchmark": "decode"}], tmp_path / "none.svg")
