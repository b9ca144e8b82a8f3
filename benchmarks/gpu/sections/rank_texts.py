"""Seeded texts of one checkpoint on one rank and on two. Counted, not judged: what is promised is said beside each figure.

On a fixed number of ranks, texts are the same every time; with `batch_invariant`, also alone and in a batch. Another number of
ranks adds in another order, so that only float32 is expected to give the same texts.
"""

from dataclasses import replace
from typing import Any

from benchmarks.gpu.random_checkpoint import random_checkpoint
from benchmarks.gpu.rank_processes import RankProcesses
from benchmarks.gpu.recorder import Recorder
from benchmarks.gpu.sections.invariance import compared
from benchmarks.gpu.settings import Settings

_SHAPE = "llama-1.1b"  # of which a checkpoint is written within seconds


def run(record: Recorder, settings: Settings) -> None:
    if record.has("1_against_2_ranks"):
        return
    if not settings.is_tiny:
        settings = replace(settings, shape=_SHAPE)
    with random_checkpoint(settings) as folder:
        found = {num_ranks: written(settings, num_ranks, folder) for num_ranks in (1, 2)}
    for num_ranks, texts in found.items():
        for name in [name for name in texts if name.endswith("together")]:
            prefix = name.removesuffix("together")
            record.put(f"{prefix}twice_on_{num_ranks}", compared(texts[name], texts[f"{prefix}again"]))
            record.put(f"{prefix}alone_and_in_a_batch_on_{num_ranks}", compared(texts[name], texts[f"{prefix}alone"]))
    record.put("1_against_2_ranks", compared(found[1]["together"], found[2]["together"]))


def written(settings: Settings, num_ranks: int, folder: str) -> dict[str, Any]:
    """The texts by their names."""
    with RankProcesses("texts", num_ranks, settings, ["--ckpt", folder]) as ranks:
        return dict(ranks.figures())
