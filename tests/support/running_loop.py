"""An engine loop that runs over a fake group of ranks, and what a reader gets from its streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.engine.engine_loop import EngineLoop
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.step_report import StepStats
from llama_core.errors import RankFailure
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import FinishReason
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.text.registry import load_tokenizer
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup
from tests.support.fake_ranks import EOS

TOKENIZER = load_tokenizer(GOLDEN / "mp1" / "tokenizer.model")


@asynccontextmanager
async def running(
    group: FakeGroup,
    *,
    slots: int = 4,
    max_waiting: int | None = None,
    depth: int = 2,
    stats: list[StepStats] | None = None,
    max_drafts: int = 0,
) -> AsyncIterator[EngineLoop]:
    """A loop of `slots` sequences, which fails its streams where the group of ranks fails."""
    config = SchedulerConfig(slots, 16, frozenset({EOS}), max_waiting, max_drafts)
    scheduler = Scheduler(config, BlockPool(group.num_blocks, group.ranks.block_size))
    on_step = stats.append if stats is not None else lambda step: None
    loop = EngineLoop(scheduler, TOKENIZER, max_seq_len=100, pipeline_depth=depth, on_step=on_step)

    async def run() -> None:
        try:
            await loop.run(group)
        except RankFailure as error:
            loop.fail(error)

    task = asyncio.create_task(run())
    try:
        yield loop
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def read(stream: SequenceStream) -> tuple[str, list[int], FinishReason | None]:
    """The whole text, the tokens, and why the stream ended."""
    text, tokens, reason = "", [], None
    async for delta in stream:
        assert reason is None, "a delta after the end"
        text += delta.text
        tokens += delta.tokens
        reason = delta.finish_reason
    return text, tokens, reason


def greedy(max_tokens: int = 20, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)  # type: ignore[arg-type]
