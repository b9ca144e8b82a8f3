"""Decode steps of the shape on several ranks, by way of the all-reduce, beside one rank."""

from functools import partial
from typing import Any

from benchmarks.gpu.rank_processes import WAYS, group_sizes, measure_in_ranks
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings


def run(record: Recorder, settings: Settings) -> None:
    sizes = group_sizes(settings)
    if not record.has("1_rank"):
        measure_in_ranks(record, settings, "decode", 1)
    for num_ranks in sizes:
        names = [f"{num_ranks}_ranks_{way}" for way in WAYS]
        if not record.has(*names):
            measure_in_ranks(record, settings, "decode", num_ranks)
        record.measure(f"{num_ranks}_ranks_speedup", partial(speedups, record.figures, names))


def speedups(figures: dict[str, Any], names: list[str]) -> dict[str, float]:
    """The time of one rank by that of the fastest way, for each number of rows."""
    measured = [figures[name] for name in names if isinstance(figures[name], dict)]
    return {f"{rows}": one / min(each[rows] for each in measured) for rows, one in figures["1_rank"].items()}
