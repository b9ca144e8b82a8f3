"""A service whose ranks a test makes fail, as exceptions or deaths."""

import asyncio
from collections.abc import Callable
from typing import Any

from deployments.args import ServerArgs
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.service import LlamaService
from deployments.fleet.own_engine import OwnEngine
from llama_core.errors import LlamaError, RankFailure
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import StepInput, StepOutput
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.requests import submit


class Crash(Exception):
    """Raised by a model where it would crash its rank."""


class Group(FakeGroup):
    """A group whose model may make it fail: by an exception if `raises`, else by a death."""

    def __init__(self, token: Callable[[list[int]], int], *, raises: bool = False) -> None:
        super().__init__(token=token, step_s=0.0005)
        self.raises = raises

    async def _compute(self, batch: StepInput) -> StepOutput:
        try:
            return await super()._compute(batch)
        except Crash:
            self.crash("rank 1 failed" if self.raises else "rank 1 died", raised=self.raises)
            return await asyncio.Future()

    def crash(self, message: str, *, raised: bool) -> None:
        if not self._failed.done():
            self._failed.set_result(RankFailure(message, rank=1, raised=raised))


class RecoveringService:
    """A service whose groups `make` creates, and the failures that it reported."""

    def __init__(self, make: Callable[[], FakeGroup], **changes: Any) -> None:
        self.groups = FakeGroupPool(make)
        self.failures: list[LlamaError] = []
        fields = {"ckpt_dir": str(GOLDEN / "mp2"), "max_seq_len": 64, "max_batch_size": 8, "recovery_timeout_s": 60}
        self.service = LlamaService(
            args := ServerArgs(**fields | changes), self.groups, on_failure=self.failures.append
        )
        self.front = OwnEngine(self.service, args)

    async def __aenter__(self) -> "RecoveringService":
        await self.front.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.front.stop()

    def ask(self, prompt: list[int], max_tokens: int = 30) -> SequenceStream:
        stream: SequenceStream = submit(self.front, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        return stream


def gated(group: FakeGroup, gate: asyncio.Event) -> FakeGroup:
    """The group starts when `gate` is set."""
    group.go = gate
    return group


def prompts(count: int) -> list[list[int]]:
    return [[1, *range(3, 5 + n)] for n in range(count)]


def steady(tokens: list[int]) -> int:
    """A model that never samples EOS, so that a request's length is known."""
    return 3 + hash(tuple(tokens)) % 500


async def read(stream: SequenceStream) -> list[int]:
    return [token async for delta in stream for token in delta.tokens]
