"""Markdown tables of figures."""

from collections.abc import Iterable, Sequence

from benchmarks.harness.common import number

NOTHING = "Not measured yet."


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column left-aligned, the others right-aligned."""
    lines = [" | ".join(columns), " | ".join(["---", *["---:"] * (len(columns) - 1)])]
    lines += [" | ".join(cell(value) for value in row) for row in rows]
    return "\n".join(f"| {line} |" for line in lines) if len(lines) > 2 else NOTHING


def cell(value: object) -> str:
    """A cell's text; a spread is written as its median and half the distance between its quartiles."""
    if isinstance(value, dict):
        median = float(value["median"])
        share = (value["high"] - value["low"]) / 2 / abs(median) if median else 0.0
        return f"{number(median)} ±{100 * share:.0f}%" if value["count"] > 1 else number(median)
    return number(value) if isinstance(value, str | int | float | None) else str(value)
