"""A runner factory for LLAMA_RUNNER_FACTORY whose real ranks fail on demand.

A demand is a file, so that it reaches one process once: `order(directory, rank, kind, phase)` writes it; the rank that takes
it writes the time of the fault, and fails.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from cluster.rank.runner_factory import load_model_runner
from cluster.wire.rank_runner import RankRunner, RendezvousSpec
from llama_core.config import EngineConfig
from tests.support.fake_runner import Fault, Faults, FaultyRunner, Kind, Phase

DIRECTORY = "LLAMA_CHAOS_DIR"
FACTORY = "tests.chaos.faulty_ranks:load"
KINDS: tuple[Kind, ...] = ("kill", "stop", "raise", "memory", "slow", "partition")
PHASES: tuple[Phase, ...] = ("rendezvous", "load", "prefill", "decode")


def order(directory: Path, rank: int, kind: Kind, phase: Phase) -> Path:
    """Demand a fault the next time that `rank` is in `phase`. Returns the file that will hold the time.time() of the fault."""
    done = directory / f"done-{time.monotonic_ns()}"
    waiting = directory / "order.new"
    waiting.write_text(f"{kind} {done}")
    waiting.rename(directory / f"{phase}-{rank}")
    return done


def load(config: EngineConfig, rendezvous: RendezvousSpec, on_progress: Callable[[int, int], None]) -> RankRunner:
    directory = Path(os.environ[DIRECTORY])
    faults = Faults(lambda phase, step: _taken_order(directory, rendezvous.rank, phase))
    faults.strike("rendezvous")

    def loading(loaded: int, total: int) -> None:
        faults.strike("load")
        on_progress(loaded, total)

    return FaultyRunner(load_model_runner(config, rendezvous, loading), faults)


def _taken_order(directory: Path, rank: int, phase: Phase) -> Fault | None:
    """The order for this rank and phase, which no other process can then take."""
    taken = directory / f"taken-{os.getpid()}"
    try:
        os.rename(directory / f"{phase}-{rank}", taken)
    except FileNotFoundError:
        return None
    kind, done = taken.read_text().split()
    Path(done).write_text(str(time.time()))
    return next(Fault(rank, known, phase) for known in KINDS if known == kind)
