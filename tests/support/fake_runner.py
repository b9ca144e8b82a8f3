"""Faults of a rank with any runner, and FakeRanks behind a runner's interface, so that a rank needs neither model nor torch."""

import importlib
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.wire.rank_runner import RankRunner, RendezvousSpec
from cluster.wire.rank_status import RankIdentity, Share
from cluster.wire.rank_worker import RankWorker
from llama_core.config import EngineConfig
from llama_core.errors import CheckpointError
from llama_core.rank_report import RankReport
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Pending, Row, SlotInit, StepInput, StepOutput
from tests.support.fake_ranks import FakeRanks, arbitrary

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


PARAMS = SamplingParams(temperature=0.0)
CONFIG = EngineConfig(ckpt_dir="none", vocab_size=100, max_seq_len=64, max_batch_size=32, device="cpu")


def step_input(step: int, epoch: int = 1, slots: tuple[int, ...] = (0, 1)) -> StepInput:
    """A step that admits a prompt of its own, [3 + step, 3 + slot], to each slot, and samples one token after each."""
    admit = [SlotInit(slot, [3 + step, 3 + slot], [slot], PARAMS) for slot in slots]
    return StepInput(epoch, step, [Row(slot, 0, 2, True) for slot in slots], admit=admit)


def tokens_of(step: int, slots: tuple[int, ...] = (0, 1)) -> list[int]:
    """The tokens that the fake ranks sample in `step_input(step, slots=slots)`."""
    return [arbitrary([3 + step, 3 + slot]) for slot in slots]


@dataclass(frozen=True)
class FakeFactory:
    """A runner factory; picklable, because it travels to the ranks."""

    faults: tuple[Fault, ...] = ()
    step_s: float = 0.0
    expect_num_blocks: int | None = None

    def __call__(
        self, config: EngineConfig, rendezvous: RendezvousSpec, on_progress: Callable[[int, int], None]
    ) -> RankRunner:
        def next_fault(phase: Phase, step: int | None) -> Fault | None:
            mine = (fault for fault in self.faults if fault.rank == rendezvous.rank and fault.phase == phase)
            return next((fault for fault in mine if fault.at_step in (None, step)), None)

        if self.expect_num_blocks is not None:
            assert rendezvous.order.former_blocks == self.expect_num_blocks
        faults = Faults(next_fault)
        on_progress(0, 1000)
        faults.strike("load")
        on_progress(1000, 1000)
        return FaultyRunner(FakeRunner(self, rendezvous), faults)


class FakeRunner:
    """Computes with FakeRanks."""

    def __init__(self, options: FakeFactory, rendezvous: RendezvousSpec) -> None:
        self.report = RankReport(device="cpu", dtype="float32", weight_bytes=1000, load_seconds=0.25)
        self._options = options
        self._rendezvous = rendezvous
        self._ranks = FakeRanks(CONFIG.block_size)
        self._steps: list[int] = []

    def max_num_blocks(self) -> int:
        return 50 - self._rendezvous.rank  # a different number on each rank; the group uses the smallest

    def seconds_waited(self) -> float | None:
        return 0.0

    def seconds_sampled(self) -> float | None:
        return 0.0

    def allocate_cache(self, num_blocks: int) -> None:
        smallest = 50 - (self._rendezvous.world_size - 1)
        assert num_blocks == (self._options.expect_num_blocks or smallest)

    def warm_up(self) -> None:
        pass

    def start(self, batch: StepInput) -> Pending[StepOutput]:
        self._steps.append(batch.step)
        assert self._steps == sorted(self._steps), "steps out of order"
        time.sleep(self._options.step_s)
        return Pending.done(self._ranks.step(batch))


class StandbyWithoutTorch(RankWorker):
    """A rank actor that does not import torch on standby, which takes longer than all else, because a FakeRunner needs none."""

    def preload(self, share: Share) -> bool:
        vars(importlib.import_module("cluster.rank.rank_process"))["_import_at_low_priority"] = lambda has_gpus: None
        return super().preload(share)


class SilentRankOne(RankWorker):
    """A rank actor whose `identify` never returns if it is rank 1."""

    def identify(self, epoch: int, num_threads: int) -> RankIdentity:
        if self.rank == 1:
            time.sleep(1000)
        return super().identify(epoch, num_threads)
