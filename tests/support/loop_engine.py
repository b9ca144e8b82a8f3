"""An engine loop without a service, behind the front half that replicas have: over FakeRanks, or a group of a test's own."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

from deployments.args import IngressArgs
from deployments.engine.engine_loop import EngineLoop
from deployments.engine.interface import EngineState, EngineSummary, Readiness, SamplingDefaults
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.service import LlamaService
from deployments.engine.step_report import StepStats
from deployments.engine.step_runner import StepRunner
from deployments.fleet.own_engine import OwnEngine
from llama_core.errors import RankFailure
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import FinishReason, Request
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.text.model_text import ModelText, TextOptions, open_model_text
from llama_core.text.registry import load_tokenizer
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup
from tests.support.fake_ranks import EOS, arbitrary
from tests.support.requests import now

TOKENIZER = load_tokenizer(GOLDEN / "mp1" / "tokenizer.model")
BLOCK_SIZE = 16
MODEL_ID = "fake-llama"


class LoopService:
    """What `OwnEngine` asks of a service."""

    model_id, numerics, num_ranks_now = MODEL_ID, "", 1

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self.engine_id = uuid.uuid4().hex
        options = TextOptions("llama2", None, "auto")
        self.text: ModelText = open_model_text(TOKENIZER, TOKENIZER.n_words, GOLDEN / "mp1", options)
        self.sampling_defaults = SamplingDefaults()
        self.adapters: dict[str, str] = {}
        self.adapter_folders: dict[str, str] = {}
        config = loop.scheduler.config
        self.config = SimpleNamespace(max_batch_size=config.max_batch_size)
        self.args = SimpleNamespace(max_queue=10_000 if config.max_waiting is None else config.max_waiting)

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def readiness(self) -> Readiness:
        if self.loop.failure is not None:
            return Readiness(False, "failed", self.loop.failure.message)
        return Readiness(not self.loop.is_draining, "draining" if self.loop.is_draining else "ready")

    def live(self) -> bool:
        return self.loop.failure is None

    def check_capacity(self, owner: str = "") -> None:
        if not self.readiness().takes_requests:
            raise self.readiness().not_ready()
        self.loop.check_capacity(owner)

    def describe(self) -> EngineState:
        scheduler = self.loop.scheduler
        return EngineState(
            model=MODEL_ID,
            phase=self.readiness().phase,
            world_size=1,
            max_seq_len=self.loop.max_seq_len,
            max_batch_size=self.config.max_batch_size,
            max_queue=self.args.max_queue,
            max_queue_tokens=10**6,
            block_size=BLOCK_SIZE,
            requests_running=scheduler.num_running,
            requests_waiting=scheduler.num_waiting,
            engines=(EngineSummary(self.engine_id, MODEL_ID, "", "ready", 0, 0, 0),),
        )


class LoopEngine(OwnEngine):
    """`running` runs its loop. A token depends on the seed and on every token before it."""

    def __init__(
        self,
        *,
        slots: int = 8,
        max_waiting: int | None = 64,
        num_blocks: int = 512,
        max_seq_len: int = 1024,
        step_tokens: int = 256,
        max_drafts: int = 0,
        depth: int = 2,
        group: FakeGroup | None = None,
        on_step: Callable[[StepStats], None] = lambda stats: None,
    ) -> None:
        self.group = group or FakeGroup(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        if group is None:
            self.group.ranks.model = arbitrary  # which depends on the seed
        pool = BlockPool(self.group.num_blocks, self.group.ranks.block_size)
        scheduler = Scheduler(SchedulerConfig(slots, step_tokens, frozenset({EOS}), max_waiting, max_drafts), pool)
        self.loop = EngineLoop(
            scheduler, TOKENIZER.n_words, max_seq_len=max_seq_len, pipeline_depth=depth, on_step=on_step
        )
        self.loop_service = LoopService(self.loop)
        super().__init__(cast(LlamaService, self.loop_service), IngressArgs())
        now(self.start())

    @property
    def ranks(self) -> Any:
        return self.group.ranks

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    @property
    def num_live(self) -> int:
        return self.loop.num_live

    @property
    def num_blocks_used(self) -> int:
        return self.scheduler.pool.num_used

    @asynccontextmanager
    async def running(self, runner: StepRunner | None = None) -> AsyncIterator["LoopEngine"]:
        """The streams fail where the ranks fail."""

        async def run() -> None:
            try:
                await self.loop.run(runner or self.group)
            except RankFailure as error:
                self.loop.fail(error)

        task = asyncio.create_task(run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.stop()


@asynccontextmanager
async def running(group: FakeGroup, *, slots: int = 4, **options: Any) -> AsyncIterator[LoopEngine]:
    """A loop of `slots` sequences. options: of LoopEngine."""
    given = {"max_waiting": None, "max_seq_len": 100, "step_tokens": 16} | options
    async with LoopEngine(group=group, slots=slots, **given).running() as engine:
        yield engine


def submitted(engine: OwnEngine, request: Request) -> Sequence[SequenceStream]:
    """The streams of a request that an engine of this process takes at once."""
    streams: Sequence[SequenceStream] = now(engine.submit(request))
    return streams


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
