"""Decode steps of the shape on several ranks beside one rank."""

from functools import partial
from typing import Any

from benchmarks.gpu.rank_processes import group_sizes, measure_in_ranks
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings


def run(record: Recorder, settings: Settings) -> None:
    sizes = group_sizes(settings)
    for num_ranks in (1, *sizes):
        if not record.has("1_rank" if num_ranks == 1 else f"{num_ranks}_ranks"):
            measure_in_ranks(record, settings, "decode", num_ranks)
    for num_ranks in sizes:
        record.measure(f"{num_ranks}_ranks_speedup", partial(speedups, record.figures, f"{num_ranks}_ranks"))


def speedups(figures: dict[str, Any], name: str) -> dict[str, float]:
    """The time of one rank by that of `name`, for each number of rows."""
    return {rows: one / figures[name][rows] for rows, one in figures["1_rank"].items()}
