"""FakeEngine with the real engine loop and scheduler behind it, over FakeRanks: streams are suspended and admitted again."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from deployments.engine.engine_loop import EngineLoop
from deployments.engine.interface import TokenStream
from deployments.engine.sequence_stream import SequenceStream
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Request
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput
from tests.support.fake_ranks import EOS, FakeRanks
from tests.support.scripted_engine import FakeEngine

BLOCK_SIZE = 16


class _Runner:
    def __init__(self) -> None:
        self.ranks = FakeRanks(BLOCK_SIZE)
        self.epoch = 0

    def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]:
        answer: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        output = self.ranks.step(batch)

        def complete() -> None:
            if not answer.done():
                answer.set_result(output)

        asyncio.get_running_loop().call_soon(complete)
        return answer


class LoopEngine(FakeEngine):
    """`running` runs its loop. A token depends on the seed and on every token before it."""

    def __init__(self, *, slots: int = 8, max_waiting: int = 64, num_blocks: int = 512) -> None:
        super().__init__()
        self.max_seq_len = 1024
        config = SchedulerConfig(slots, 256, frozenset({EOS}), max_waiting=max_waiting)
        self.loop = EngineLoop(
            Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE)), self.tokenizer, max_seq_len=self.max_seq_len
        )
        self.runner = _Runner()

    @property
    def ranks(self) -> FakeRanks:
        return self.runner.ranks

    @property
    def num_live(self) -> int:
        return self.loop.num_live

    @property
    def num_blocks_used(self) -> int:
        return self.loop.scheduler.pool.num_used

    @asynccontextmanager
    async def running(self) -> AsyncIterator["LoopEngine"]:
        task = asyncio.create_task(self.loop.run(self.runner))
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def cache_scope(self, owner: str) -> str:
        return owner

    def check_capacity(self, owner: str = "") -> None:
        self.loop.check_capacity(owner)

    async def submit(  # type: ignore[override]  # streams of another class
        self, request: Request, *, is_timed: bool = False, numerics: str = ""
    ) -> Sequence[TokenStream]:
        return self.loop.submit(request, is_timed=is_timed)

    async def readmit(self, streams: Sequence[TokenStream], *, is_timed: bool = False) -> None:
        self.loop.readmit(cast(Sequence[SequenceStream], streams), is_timed=is_timed)
