"""The growth of a decode step's time with the number of sequences and with their tokens: is any term worse than linear?

    python -m benchmarks growth --ckpt DIRECTORY

Each series is fitted by a straight line. A small step is bound by reading the weights once for all rows, a large one by
arithmetic, so a curve may consist of two straight lines. A term worse than linear keeps getting steeper: the last quarter of
the range is then steeper than the quarter before it by more than --tolerance and by more than noise (a square by 1.4).
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.common import Cell, Spread, emit, print_table
from benchmarks.harness.in_process import built_llama, case_name, run, vocabulary
from benchmarks.harness.options import add_model_options, model_name, question_parser
from benchmarks.harness.workload import uniform_batch
from llama_core import Llama

STEP_TOKENS = 1024  # tokens of a prompt chunk


@dataclass(frozen=True, slots=True)
class Line:
    """y = at_zero + slope * x, by least squares."""

    at_zero: float
    slope: float

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> "Line":
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
        return cls(mean_y - slope * mean_x, slope)


@dataclass(frozen=True, slots=True)
class Growth:
    """A series' line, the approximate slopes of the third and last quarter of its range, and whether the last is too steep."""

    line: Line
    third_quarter: float
    last_quarter: float
    worse_than_linear: bool

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]], noise: float, tolerance: float) -> "Growth":
        """`noise`: the error of y. The two quarters are those of the upper half of x, or of the last three points."""
        ordered = sorted(points)
        assert len(ordered) >= 3, "a curve needs three points"
        first, last = ordered[0][0], ordered[-1][0]
        upper = ordered[-max(3, sum(x >= (first + last) / 2 for x, _ in ordered)) :]
        border = min(range(1, len(upper) - 1), key=lambda i: abs(upper[i][0] - (upper[0][0] + last) / 2))
        third, fourth = Line.through(upper[: border + 1]).slope, Line.through(upper[border:]).slope
        excess = (fourth - tolerance * max(third, 0.0)) * (last - upper[border][0])
        return cls(Line.through(ordered), third, fourth, excess > noise)


def decode_ms(llama: Llama, rows: int, context: int, steps: int) -> list[float]:
    """Milliseconds of each decode step of `rows` sequences that have `context` tokens or slightly more."""
    # Prompts are computed in chunks, so the first sequence decodes during the last prompt's prefill.
    requests = uniform_batch(rows, context, _prefill_steps(llama, rows, context) + steps + 1, vocabulary(llama))
    decodes = [step for step in run(llama, requests).decode_steps if step.num_rows == rows]
    return [step.ms for step in decodes[1:]]  # the caches still hold data of the prefill in the first step


def _prefill_steps(llama: Llama, rows: int, context: int) -> int:
    """The largest number of steps that the prefill of all prompts takes."""
    return math.ceil(rows * context / (llama.runner.config.max_step_tokens - rows)) + 1


def measure(options: argparse.Namespace, vary: str, values: Sequence[int], fixed: int) -> dict[str, Any]:
    """One series: "rows" at a fixed context, or "context" at a fixed number of rows."""
    points = [(value, fixed) if vary == "rows" else (fixed, value) for value in values]
    rows, context = max(rows for rows, _ in points), max(context for _, context in points)
    with built_llama(
        options,
        dtype=options.dtype,
        max_seq_len=context + options.steps + 2 + math.ceil(rows * context / (STEP_TOKENS - rows)),
        max_batch_size=rows,
        max_step_tokens=STEP_TOKENS,
    ) as llama:
        run(llama, uniform_batch(rows, min(64, context), 2, vocabulary(llama)))  # builds kernels, touches pages
        steps: dict[tuple[int, int], list[float]] = {point: [] for point in points}
        # All points, then all points again, so that a short disturbance affects several points.
        for rows, context in points * int(options.repeats):
            steps[rows, context] += decode_ms(llama, rows, context, options.steps)
        spreads = [Spread.of(steps[point]) for point in points]
        weights = case_name(llama, options)
    noise = max(spread.high - spread.low for spread in spreads)
    medians = [(float(value), spread.median) for value, spread in zip(values, spreads, strict=True)]
    return {
        "weights": weights,
        "vary": vary,
        "fixed": fixed,
        "points": [{vary: value, "step_ms": spread} for value, spread in zip(values, spreads, strict=True)],
        "growth": Growth.of(medians, noise, options.tolerance),
    }


def main(argv: Sequence[str]) -> None:
    parser = question_parser("growth", __doc__)
    add_model_options(parser)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[128, 512, 1024, 2048, 2560, 3072, 3584, 4096])
    parser.add_argument("--rows-context", type=int, default=256, help="context while the rows grow")
    parser.add_argument("--context-rows", type=int, default=4, help="rows while the context grows")
    parser.add_argument("--steps", type=int, default=16, help="steps of each point, each time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=1.2)
    options = parser.parse_args(argv)
    series = [
        measure(options, "rows", options.rows, options.rows_context),
        measure(options, "context", options.context, options.context_rows),
    ]
    name = series[0]["weights"]
    for one in series:
        growth: Growth = one["growth"]
        other = "context" if one["vary"] == "rows" else "rows"
        rows: list[tuple[Cell | Spread, ...]] = [(point[one["vary"]], point["step_ms"]) for point in one["points"]]
        print_table(
            f"Decode step by {one['vary']}, {model_name(options)} {name}, {other} {one['fixed']}",
            [one["vary"], "ms"],
            rows,
        )
        print(
            f"  line: {growth.line.at_zero:.3g} ms + {growth.line.slope * 1e3:.3g} us x {one['vary']}; "
            f"third quarter {growth.third_quarter * 1e3:.3g} us, last {growth.last_quarter * 1e3:.3g} us: "
            f"{'WORSE THAN LINEAR' if growth.worse_than_linear else 'no term worse than linear'}"
        )
    emit("growth", {"model": model_name(options), "weights": name, "series": series}, options)
