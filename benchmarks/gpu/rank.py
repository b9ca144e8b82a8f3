"""One rank of a group: `python -m benchmarks.gpu.rank TASK RANK NUM_RANKS FOLDER [--have FIGURE] [--ckpt DIR] [settings]`.

Rank r uses GPU r. All ranks run the same task; rank 0 prints each figure as a line of JSON. FOLDER: where they meet.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu.clock import clock_of
from benchmarks.gpu.engine import Engine, HandMadeSteps, open_engine
from benchmarks.gpu.sections.invariance import REQUESTS, texts
from benchmarks.gpu.settings import Settings, add_settings, settings_of
from llama_core.errors import ConfigError
from llama_core.execution.fused.backend import FusedBackend
from llama_core.execution.parallel import Parallel, join, leave, smallest

_WARM_UP = 5


class Rank:
    """One rank's place, and what is known already."""

    def __init__(self, settings: Settings, parallel: Parallel, options: argparse.Namespace) -> None:
        self.settings, self.parallel = settings, parallel
        self.ckpt: Path | None = options.ckpt
        self._have = set(options.have)

    def measure(self, name: str, function: Callable[[], object]) -> None:
        """On every rank: report what `function` returns, or why the configuration is refused, unless it is known."""
        if name in self._have:
            return
        value: object
        try:
            value = function()
        except ConfigError as error:  # on all ranks alike
            value = str(error)
        clock_of(self.settings.device).free_bytes()  # the next engine's cache takes what is free
        self.say(name, value)

    def say(self, name: str, value: object) -> None:
        if self.parallel.rank == 0:
            print(json.dumps({name: value}), flush=True)


def decode(rank: Rank) -> None:
    """Milliseconds of decode steps by the number of rows, with random weights."""
    count = rank.parallel.world_size
    rank.measure("1_rank" if count == 1 else f"{count}_ranks", partial(_decode_times, rank))


def _decode_times(rank: Rank) -> dict[str, float]:
    settings, sizes = rank.settings, rank.settings.sizes
    engine = open_engine(settings, sizes.context, max(sizes.rows), parallel=rank.parallel)
    found = {}
    for rows in sizes.rows:
        steps = HandMadeSteps(engine, rows, engine.context_for(rows, max(1, sizes.prompt // 4)))
        ends, pending = [], engine.runner.start(steps.decode())
        for _ in range(sizes.repeats + _WARM_UP):
            following = engine.runner.start(steps.decode())
            pending.result()
            ends.append(time.perf_counter())
            pending = following
        pending.result()
        times = [after - before for before, after in itertools.pairwise(ends)]
        found[f"rows_{rows}_ms"] = statistics.median(times[_WARM_UP - 1 :]) * 1e3
    _release_graphs(engine)
    return found


def replay(rank: Rank) -> None:
    """Decodes until it is killed."""
    sizes = rank.settings.sizes
    engine = open_engine(rank.settings, sizes.context, max(sizes.rows), parallel=rank.parallel)
    steps = HandMadeSteps(engine, max(sizes.rows), engine.context_for(max(sizes.rows), max(1, sizes.prompt // 4)))
    pending = engine.runner.start(steps.decode())
    rank.say("ready", value=True)
    while True:
        following = engine.runner.start(steps.decode())
        pending.result()
        pending = following


def write_texts(rank: Rank) -> None:
    """Seeded texts of the checkpoint: all requests together, together again, and each alone."""
    is_gpu = rank.settings.device == "cuda"
    for prefix, is_invariant in (("", False), *([("batch_invariant_", True)] if is_gpu else [])):
        engine = open_engine(
            rank.settings,
            rank.settings.sizes.context,
            REQUESTS,
            ckpt=rank.ckpt,
            batch_invariant=is_invariant,
            parallel=rank.parallel,
        )
        for name in ("together", "again"):
            rank.say(prefix + name, texts(engine, rank.settings, range(REQUESTS)))
        alone = [text for seed in range(REQUESTS) for text in texts(engine, rank.settings, [seed])]
        rank.say(f"{prefix}alone", alone)
        _release_graphs(engine)
        del engine
        clock_of(rank.settings.device).free_bytes()  # the next engine's cache takes what is free


def _release_graphs(engine: Engine) -> None:
    """NCCL's group must not outlive them."""
    backend = engine.runner.backend
    if isinstance(backend, FusedBackend):
        backend.release_graphs()


TASKS: dict[str, Callable[[Rank], None]] = {
    "decode": decode,
    "replay": replay,
    "texts": write_texts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("rank", type=int)
    parser.add_argument("num_ranks", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--have", action="append", default=[], help="a figure that is not to be measured again")
    parser.add_argument("--ckpt", type=Path)
    add_settings(parser)
    options = parser.parse_args()
    settings = settings_of(options)
    if settings.device == "cpu":
        torch.set_num_threads(1)
    store = dist.FileStore(str(options.folder / "store"), options.num_ranks)  # type: ignore[attr-defined]
    parallel = join(options.rank, options.num_ranks, settings.device, store, device_index=options.rank)  # type: ignore[arg-type]
    TASKS[options.task](Rank(settings, parallel, options))
    smallest(parallel, 1)  # waits for all ranks
    leave()


if __name__ == "__main__":
    main()
