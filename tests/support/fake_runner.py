"""A rank's runner without a model: answers at once, and fails, sleeps or dies where a test says so. Needs no torch."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.rank.rank_worker import RankIdentity, RankWorker
from cluster.rank.runner_factory import Seat
from llama_core.checkpoint.digest import CheckpointDigest
from llama_core.config import EngineConfig
from llama_core.errors import CheckpointError
from llama_core.scheduling.step import Pending, StepInput, StepOutput

COMPUTES_S = 0.01  # a step that computes by itself
CONFIG = EngineConfig(ckpt_dir="none", vocab_size=100, max_seq_len=64, max_batch_size=32, device="cpu")


@dataclass(frozen=True)
class FakeReport:
    seconds: float = 0.25
    weight_bytes: int = 1000
    device: str = "cpu"
    dtype: str = "float32"
    files_id: int = 0
    digest: CheckpointDigest | None = None


@dataclass(frozen=True)
class FakeFactory:
    """Picklable, as a factory must be. Things happen on rank `on_rank` alone; `at_step` counts `StepInput.step`."""

    on_rank: int = -1
    raise_in_load: str | None = None
    raise_in_warm_up: str | None = None
    die_in_load: bool = False
    die_in_warm_up: bool = False
    hang_in_load: bool = False
    raise_at_step: int = -1
    collective_error_elsewhere: bool = False
    step_seconds: float = 0.0
    computes_by_itself: bool = False  # as a GPU does; a token is then the number of steps started when its step is read
    expect_num_blocks: int | None = None

    def __call__(self, config: EngineConfig, seat: Seat, on_progress: Callable[[int, int], None]) -> "FakeRunner":
        on_progress(0, 1000)
        if seat.rank == self.on_rank:
            if self.raise_in_load == "checkpoint":
                raise CheckpointError("shard 1 is damaged", param="ckpt_dir")
            if self.raise_in_load:
                raise ValueError(self.raise_in_load)
            if self.die_in_load:
                os.kill(os.getpid(), 9)
            if self.hang_in_load:
                time.sleep(1000)
        on_progress(1000, 1000)
        return FakeRunner(self, seat)


class FakeRunner:
    """Its token for a row is 1000 * step + slot, so that a test sees which step and row an answer belongs to."""

    def __init__(self, faults: FakeFactory, seat: Seat) -> None:
        self.report = FakeReport()
        self._faults = faults
        self._seat = seat
        self._steps: list[int] = []
        self._ready_at = 0.0

    def max_num_blocks(self) -> int:
        return 50 - self._seat.rank  # ranks differ, so that the smallest must be taken

    def seconds_waited(self) -> float | None:
        return 0.0

    def allocate_cache(self, num_blocks: int) -> None:
        smallest = 50 - (self._seat.world_size - 1)
        assert num_blocks == (self._faults.expect_num_blocks or smallest)

    def warm_up(self) -> None:
        if self._seat.rank == self._faults.on_rank and self._faults.raise_in_warm_up:
            raise RuntimeError(self._faults.raise_in_warm_up)
        if self._seat.rank == self._faults.on_rank and self._faults.die_in_warm_up:
            os.kill(os.getpid(), 9)

    def start(self, batch: StepInput) -> Pending[StepOutput]:
        self._steps.append(batch.step)
        assert self._steps == sorted(self._steps), "steps out of order"
        if batch.step == self._faults.raise_at_step:
            if self._seat.rank == self._faults.on_rank:
                time.sleep(0.02 if self._faults.collective_error_elsewhere else 0)
                raise ValueError("injected fault")
            if self._faults.collective_error_elsewhere:
                raise RuntimeError("[gloo] Connection closed by peer")
        if self._faults.step_seconds:
            time.sleep(self._faults.step_seconds)
        if self._faults.computes_by_itself:
            return self._compute_by_itself(batch)
        tokens = [1000 * batch.step + row.slot for row in batch.rows if row.samples]
        return Pending.done(StepOutput(batch.epoch, batch.step, tokens))

    def _compute_by_itself(self, batch: StepInput) -> Pending[StepOutput]:
        ready_at = max(time.monotonic(), self._ready_at) + COMPUTES_S
        self._ready_at = ready_at

        def result() -> StepOutput:
            time.sleep(max(0.0, ready_at - time.monotonic()))
            return StepOutput(batch.epoch, batch.step, [len(self._steps)] * batch.num_draws)

        return Pending(result, lambda: time.monotonic() >= ready_at)


class SilentRankOne(RankWorker):
    """Never says who it is if it is rank 1."""

    def identify(self, epoch: int) -> RankIdentity:
        if self.rank == 1:
            time.sleep(1000)
        return super().identify(epoch)
