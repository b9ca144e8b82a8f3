"""Draws docs/performance.svg from benchmarks/results: the parts of a step beside their limits, and the ratios to peers.

    .venv/bin/pip install -c constraints.txt -e '.[bench]' && python -m benchmarks plot

Plots every result of `step` and `paired` in the directory, in the order of the file names. The same results give the same
file.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.harness import anatomy
from benchmarks.harness.common import REPOSITORY
from benchmarks.harness.options import command_parser
from benchmarks.report.report import RESULTS, read_results

OTHER = "everything else"
# Parts that share a bar. The colours can be told apart by readers with colour blindness (Okabe and Ito).
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "feed-forward": ("#0072B2", (anatomy.FEED_FORWARD, "gate and up", "project down")),
    "attention's projections": ("#56B4E9", (anatomy.QKV, anatomy.OUT, "project q, k, v", "project out")),
    "attention over the cache": ("#009E73", (anatomy.ATTENTION, "attend", "rotate, write cache")),
    "vocabulary": ("#E69F00", (anatomy.VOCABULARY, "logits")),
    "sampling": ("#CC79A7", ("sample", "draw")),
    "between the steps": ("#D55E00", (anatomy.BETWEEN,)),
    OTHER: ("#999999", ()),
}
_TICKS = (0.1, 0.2, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50)  # of ratios, on a logarithmic axis
_KIND_OF_PART = {part: kind for kind, (_, parts) in KINDS.items() for part in parts}


def by_kind(parts: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """Milliseconds of each kind: measured ("ms", a spread) or the lower bound ("least_ms")."""
    totals = dict.fromkeys(KINDS, 0.0)
    for part in parts:
        value = part[key]
        totals[_KIND_OF_PART.get(part["part"], OTHER)] += value["median"] if isinstance(value, dict) else value
    return totals


def draw_steps(axes: Axes, cases: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Two bars for each case, as shares of the measured step: the parts' times, and the time to read their bytes."""
    widest = 100.0
    for place, (_, case) in enumerate(cases):
        measured, least = by_kind(case["parts"], "ms"), by_kind(case["parts"], "least_ms")
        whole = sum(measured.values())
        for offset, taken, alpha in ((-0.2, measured, 1.0), (0.2, least, 0.55)):
            left = 0.0
            for kind, (colour, _) in KINDS.items():
                width = 100 * taken[kind] / whole
                axes.barh(place + offset, width, 0.36, left, color=colour, alpha=alpha, linewidth=0)
                left += width
        axes.text(101, place - 0.2, f"{whole:.3g} ms", va="center", fontsize=8)
        share = 100 * sum(least.values()) / whole
        widest = max(widest, share)
        axes.text(share + 1, place + 0.2, f"reading alone: {share:.0f}%", va="center", fontsize=8)
    axes.set_yticks(range(len(cases)), [label for label, _ in cases])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * widest)
    axes.set_xlabel("% of the step")
    axes.set_title("Parts of a decode step, and the time to read its bytes", loc="left", fontsize=10)


def ratios_of(results: Sequence[dict[str, Any]]) -> list[tuple[str, float, float, float]]:
    """Label, ratio, minimum and maximum of every figure of every paired run; inverted where less is better."""
    found = []
    for result in results:
        load = f" c{result['concurrency']}" if result["question"] == "online" else ""
        for name, figures in result["ratios"].items():
            for figure, one in figures.items():
                values = [one["ratio"][key] for key in ("median", "least", "most")]
                if one["lower_is_better"]:
                    values = [1 / value for value in (values[0], values[2], values[1])]
                what = figure.removesuffix("_tok_s") if figure.endswith("_tok_s") else figure.removesuffix("_ms")
                where = f"{result['model']} {result['dtype']}, {result['question']}{load}"
                found.append((f"{where}, {what}: {result['first']} / {name}", values[0], values[1], values[2]))
    return found


def draw_ratios(axes: Axes, ratios: Sequence[tuple[str, float, float, float]]) -> None:
    for place, (_, ratio, least, most) in enumerate(ratios):
        colour = "#0072B2" if ratio >= 1 else "#D55E00"
        axes.plot([least, most], [place, place], color=colour, linewidth=1.5, solid_capstyle="butt")
        axes.plot([ratio], [place], "o", color=colour, markersize=5)
        axes.text(most * 1.03, place, f"{ratio:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    smallest = min(least for _, _, least, _ in ratios)
    largest = max(most for _, _, _, most in ratios)
    lower, upper = min(0.8, smallest * 0.9), max(1.25, largest * 1.3)
    axes.set_xlim(lower, upper)
    axes.set_xticks([tick for tick in _TICKS if lower <= tick <= upper])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_yticks(range(len(ratios)), [label for label, *_ in ratios], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times as good, median and range of the rounds of one run")
    axes.set_title("Ratios to other servers, in the same run", loc="left", fontsize=10)


def draw(results: Sequence[dict[str, Any]], target: Path) -> None:
    """Write the plot. Raises ValueError if there is no result to plot."""
    steps = [
        (f"{result['model']} {result['weights']}\n{case['rows']} row{'s' * (case['rows'] > 1)}", case)
        for result in results
        if result["benchmark"] == "step"
        for case in result["cases"]
    ]
    ratios = ratios_of([result for result in results if result["benchmark"] == "paired"])
    heights = [0.7 * len(steps) + 1.6] * bool(steps) + [0.24 * len(ratios) + 1.0] * bool(ratios)
    if not heights:
        raise ValueError("there is no result of step or of the paired runner")
    mpl.rcParams["svg.hashsalt"] = "llama"  # the same ids in every run
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    places = iter(axes)
    if steps:
        draw_steps(next(places), steps)
        handles = [Patch(color=colour, label=kind) for kind, (colour, _) in KINDS.items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    if ratios:
        draw_ratios(next(places), ratios)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=120)


def main(argv: Sequence[str]) -> None:
    parser = command_parser("plot", __doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "performance.svg")
    options = parser.parse_args(argv)
    try:
        draw([one for one in read_results(options.results) if not one["folder"]], options.out)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    print(options.out)
