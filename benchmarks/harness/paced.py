"""Ranks without a model whose steps take a fixed time, so that the rest of a server can be measured.

`build_app` is our application with such ranks, for the import_path of a serve configuration; `PacedGroup` is their group for
an engine without Ray. The environment variable PACED_STEP_MS is the time of a step.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence

from ray.serve import Application

import deployments.app
from benchmarks.harness.null_runner import NullRunner
from cluster.driver.fan_out import FanOut
from cluster.driver.group_info import GroupInfo
from cluster.wire.messages import Answer, decode_step
from cluster.wire.rank_runner import RendezvousSpec
from cluster.wire.rank_status import RankStatus
from cluster.wire.transport import Invitation, RankListener, connect
from deployments.args import ServerArgs
from llama_core.config import EngineConfig
from llama_core.errors import RankFailure
from llama_core.scheduling.step import Pending, StepInput, StepOutput

STEP_MS = "PACED_STEP_MS"
NUM_BLOCKS = 4096
_FIRST_TEXT_ID = 259  # after control and byte pieces


class PacedRunner(NullRunner):
    """Samples tokens without repetition. A step begins when the previous one has ended, as on a device."""

    num_blocks = NUM_BLOCKS

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._step_s = float(os.environ.get(STEP_MS, "8")) / 1e3
        self._free_at_s = 0.0

    def start(self, batch: StepInput) -> Pending[StepOutput]:
        self._free_at_s = max(self._free_at_s, time.monotonic()) + self._step_s
        if (left_s := self._free_at_s - time.monotonic()) > 0:
            time.sleep(left_s)
        num_texts = self._vocab_size - _FIRST_TEXT_ID
        tokens = [
            _FIRST_TEXT_ID + 7919 * (row.start + row.length + 131 * row.slot) % num_texts
            for row in batch.rows
            if row.samples
        ]
        return Pending.done(StepOutput(batch.epoch, batch.step, tokens, elapsed_ms=1e3 * self._step_s))


def make_paced_runner(
    config: EngineConfig, rendezvous: RendezvousSpec, on_progress: Callable[[int, int], None]
) -> PacedRunner:
    return PacedRunner(config.vocab_size)


def answer_steps(invitation: Invitation, vocab_size: int) -> None:
    """The process of a rank, without Ray."""
    frames = connect(invitation, 0, 30.0)
    runner = PacedRunner(vocab_size)
    while (payload := frames.receive()) is not None:
        frames.send(Answer(runner.start(decode_step(payload)).result()))


class PacedGroup:
    """Implements `deployments.engine.supervisor.Group` over one such process."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._fan_out: FanOut | None = None

    async def start(self) -> GroupInfo:
        listener = RankListener(0, 1, None)
        invitation = await listener.open()
        spawn = multiprocessing.get_context("spawn")
        spawn.Process(target=answer_steps, args=(invitation, self._config.vocab_size), daemon=True).start()
        connections = await listener.connections()
        self._fan_out = FanOut(
            connections,
            epoch=0,
            step_timeout_s=60.0,
            on_failure=lambda error: None,
            on_overdue=lambda ranks, waited_s: None,
        )
        return GroupInfo(epoch=0, num_blocks=NUM_BLOCKS, ranks=())

    async def statuses(self) -> list[RankStatus | None]:
        return []

    def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]:
        assert self._fan_out is not None
        return self._fan_out.submit(batch)

    async def wait_failed(self) -> RankFailure:
        never: asyncio.Future[RankFailure] = asyncio.get_running_loop().create_future()
        return await never

    async def stop(self) -> None:
        if self._fan_out is not None:
            self._fan_out.fail(RankFailure("stopped"))


class PacedGroupPool:
    """Implements `deployments.engine.supervisor.GroupPool` with paced groups."""

    num_standby = 0

    async def usable_bundles(self) -> list[int]:
        return [1]

    def open_group(
        self, config: EngineConfig, epoch: int, num_blocks: int | None, bundle_indices: Sequence[int]
    ) -> PacedGroup:
        return PacedGroup(config)

    def prepare_standby(self, info: GroupInfo) -> None:
        pass

    async def stop(self) -> None:
        pass


class PacedArgs(ServerArgs):
    """The server's arguments, with ranks that run `make_paced_runner`."""

    runner_factory: str | None = "benchmarks.harness.paced:make_paced_runner"


def build_app(args: PacedArgs) -> Application:
    return deployments.app.build_app(args)
