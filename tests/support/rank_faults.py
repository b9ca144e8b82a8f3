"""Faults that tests inject into a rank with any runner: the kind of fault and the phase of the rank's life."""

import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.wire.rank_runner import RankRunner
from llama_core.errors import CheckpointError
from llama_core.scheduling.step import Pending, StepInput, StepOutput

Kind = Literal["kill", "stop", "raise", "memory", "slow", "partition", "damaged", "collective"]
Phase = Literal["rendezvous", "load", "warm_up", "prefill", "decode"]

SLOW_STEPS, SLOW_S = 20, 0.05


@dataclass(frozen=True)
class Fault:
    """`kind` happens on `rank` in `phase`, once; in a step only if its number is `at_step`, where one is given."""

    rank: int
    kind: Kind
    phase: Phase
    message: str = "injected fault"
    at_step: int | None = None
    after_s: float = 0.0


class Faults:
    """The faults of one rank. `next_fault(phase, step)` says which one happens now, if any."""

    def __init__(self, next_fault: Callable[[Phase, int | None], Fault | None]) -> None:
        self._next_fault = next_fault
        self.num_slow_steps = 0  # remaining steps that take SLOW_S longer

    def strike(self, phase: Phase, step: int | None = None) -> None:
        """Inject the fault of this phase into the calling process."""
        fault = self._next_fault(phase, step)
        if fault is None:
            return
        time.sleep(fault.after_s)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise ValueError(fault.message)
            case "damaged":
                raise CheckpointError(fault.message, param="ckpt_dir")
            case "collective":
                raise RuntimeError("[gloo] Connection closed by peer")
            case "memory":
                _exhaust_memory()
            case "slow":
                self.num_slow_steps = SLOW_STEPS
            case "partition":
                time.sleep(3600)  # Ray still reaches the process, but it answers no step


def _exhaust_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
    bytearray(2**30)


class FaultyRunner:
    """A rank's runner that suffers its faults while it warms up and before each step."""

    def __init__(self, runner: RankRunner, faults: Faults) -> None:
        self._runner = runner
        self._faults = faults
        self.report = runner.report
        self.max_num_blocks = runner.max_num_blocks
        self.seconds_waited = runner.seconds_waited
        self.seconds_sampled = runner.seconds_sampled
        self.allocate_cache = runner.allocate_cache

    def warm_up(self) -> None:
        self._faults.strike("warm_up")
        self._runner.warm_up()

    def start(self, batch: StepInput) -> Pending[StepOutput]:
        is_prefill = any(row.length > 1 + row.num_drafts for row in batch.rows)
        self._faults.strike("prefill" if is_prefill else "decode", batch.step)
        if self._faults.num_slow_steps:
            self._faults.num_slow_steps -= 1
            time.sleep(SLOW_S)
        return self._runner.start(batch)
