"""Microseconds of a sum over ranks with its add and norm, inside a graph, by way, width and number of rows."""

from benchmarks.gpu.rank_processes import group_sizes, measure_in_ranks
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.settings import Settings


def run(record: Recorder, settings: Settings) -> None:
    """A way that the GPUs do not have is named with the reason."""
    for num_ranks in group_sizes(settings):
        measure_in_ranks(record, settings, "all_reduce", num_ranks)
