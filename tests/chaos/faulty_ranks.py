"""Ranks that fail to order: a runner factory for LLAMA_RUNNER_FACTORY. The order is a file, so that it hits one process once.

`order(directory, rank, kind, phase)` leaves it; the rank that takes it writes when, and fails.
"""

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from cluster.rank.runner_factory import Seat, StepExecutor, load_model_runner
from llama_core.config import EngineConfig
from llama_core.scheduling.step import Pending, StepInput, StepOutput

DIRECTORY = "LLAMA_CHAOS_DIR"
FACTORY = "tests.chaos.faulty_ranks:load"
SLOW_STEPS, SLOW_S = 20, 0.05

Kind = Literal["kill", "stop", "raise", "memory", "slow", "partition"]
Phase = Literal["rendezvous", "load", "prefill", "decode"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PHASES: tuple[Phase, ...] = get_args(Phase)


def order(directory: Path, rank: int, kind: Kind, phase: Phase) -> Path:
    """The next time that `rank` is in `phase`. Returns the file that says, once it has happened, at what time.time()."""
    done = directory / f"done-{time.monotonic_ns()}"
    waiting = directory / "order.new"
    waiting.write_text(f"{kind} {done}")
    waiting.rename(directory / f"{phase}-{rank}")
    return done


def load(config: EngineConfig, seat: Seat, on_progress: Callable[[int, int], None]) -> StepExecutor:
    faults = _Faults(Path(os.environ[DIRECTORY]), seat.rank)
    faults.strike("rendezvous")

    def loading(loaded: int, total: int) -> None:
        faults.strike("load")
        on_progress(loaded, total)

    return FaultyRunner(load_model_runner(config, seat, loading), faults)


class _Faults:
    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self.num_slow = 0

    def strike(self, phase: Phase) -> None:
        taken = self._directory / f"taken-{os.getpid()}"
        try:
            os.rename(self._directory / f"{phase}-{self._rank}", taken)
        except FileNotFoundError:
            return
        kind, done = taken.read_text().split()
        Path(done).write_text(str(time.time()))
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "raise":
            raise ValueError("injected fault")
        elif kind == "memory":
            _exhaust_memory()
        elif kind == "slow":
            self.num_slow = SLOW_STEPS
        elif kind == "partition":
            time.sleep(3600)  # Ray still reaches it, but no answer to a step ever comes


def _exhaust_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
    bytearray(2**30)


class FaultyRunner:
    """The real one, until an order comes."""

    def __init__(self, runner: StepExecutor, faults: _Faults) -> None:
        self._runner = runner
        self._faults = faults
        self.report = runner.report
        self.max_num_blocks = runner.max_num_blocks
        self.seconds_waited = runner.seconds_waited
        self.allocate_cache = runner.allocate_cache
        self.warm_up = runner.warm_up

    def start(self, batch: StepInput) -> Pending[StepOutput]:
        is_prefill = any(row.length > 1 + row.num_drafts for row in batch.rows)
        self._faults.strike("prefill" if is_prefill else "decode")
        if self._faults.num_slow:
            self._faults.num_slow -= 1
            time.sleep(SLOW_S)
        return self._runner.start(batch)
