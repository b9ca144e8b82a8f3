"""FakeRanks behind the supervisor's interfaces `Group` and `GroupPool`. The test makes a group fail."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from cluster.driver.group_info import GroupInfo
from cluster.wire.rank_status import RankStatus
from llama_core.config import EngineConfig
from llama_core.errors import LlamaError, RankFailure
from llama_core.rank_report import RankReport
from llama_core.scheduling.step import StepInput, StepOutput
from tests.support.fake_ranks import FakeRanks, arbitrary
from tests.support.virtual_loop import VirtualLoop


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        if isinstance(loop, VirtualLoop):  # time passes there only while this waits
            await loop.until(condition)
        while not condition():  # noqa: ASYNC110 (the condition has no event)
            await asyncio.sleep(0)


class FakeGroupPool:
    """Implements `deployments.engine.supervisor.GroupPool`: each group is made by `make` and recorded."""

    def __init__(self, make: "Callable[[], FakeGroup]") -> None:
        self.make = make
        self.made: list[FakeGroup] = []
        self.opened: list[tuple[int, int | None]] = []  # epoch and blocks
        self.bundles_opened: list[list[int]] = []
        self.room: Callable[[], list[int] | None] | None = None  # free bundles; None: all of the first group's
        self.num_prepared = 0
        self.num_standby = 0
        self.stopped = False

    async def usable_bundles(self) -> list[int] | None:
        return self.room() if self.room is not None else self.bundles_opened[0]

    async def fetch(self) -> None:
        pass

    def open_group(
        self, config: EngineConfig, epoch: int, num_blocks: int | None, bundle_indices: Sequence[int]
    ) -> "FakeGroup":
        assert not self.made or self.made[-1].stopped, "a new group opens only after the last one has stopped"
        self.opened.append((epoch, num_blocks))
        self.bundles_opened.append(list(bundle_indices))
        self.made.append(self.make())
        return self.made[-1]

    def prepare_standby(self, info: GroupInfo) -> None:
        self.num_prepared += 1

    async def stop(self) -> None:
        self.stopped = True


class FakeGroup:
    """Implements `deployments.engine.supervisor.Group`. A step takes `step_s`; `token` is the rule for the next token."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        step_s: float = 0.0,
        token: Callable[[list[int]], int] = arbitrary,
    ) -> None:
        self.num_blocks = num_blocks
        self.step_s = step_s
        self.ranks = FakeRanks(block_size, lambda tokens, seed: token(tokens))
        self.steps: list[StepInput] = []
        self.in_flight = 0
        self.max_in_flight = 0
        self.stopped = False
        self.start_error: LlamaError | None = None
        self.reports: tuple[RankReport, ...] = ()
        self._failed: asyncio.Future[RankFailure] = asyncio.get_running_loop().create_future()
        self._turn = asyncio.Lock()
        self.go = asyncio.Event()
        self.go.set()

    async def start(self) -> GroupInfo:
        await self.go.wait()
        if self.start_error is not None:
            raise self.start_error
        return GroupInfo(epoch=0, num_blocks=self.num_blocks, ranks=self.reports)

    async def statuses(self) -> list[RankStatus | None]:
        return [None]

    def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]:
        return asyncio.ensure_future(self.step(batch))

    async def step(self, batch: StepInput) -> StepOutput:
        if self._failed.done():
            raise self._failed.result()
        self.steps.append(batch)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            async with self._turn:
                if self._failed.done():
                    raise self._failed.result()
                computing = asyncio.ensure_future(self._compute(batch))
                first: set[asyncio.Future[Any]] = {computing, self._failed}
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if self._failed.done():
                    computing.cancel()
                    raise self._failed.result()
                return computing.result()
        finally:
            self.in_flight -= 1

    async def _compute(self, batch: StepInput) -> StepOutput:
        await asyncio.sleep(self.step_s)
        await self.go.wait()
        return self.ranks.step(batch)

    def fail(self, message: str = "rank 1 died") -> None:
        self._failed.set_result(RankFailure(message, rank=1))

    async def wait_failed(self) -> RankFailure:
        return await asyncio.shield(self._failed)

    async def stop(self) -> None:
        self.stopped = True
