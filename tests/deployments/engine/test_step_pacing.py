"""The next step is made late enough for requests that arrive meanwhile, and early enough for the ranks."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.step_pacing import HOLD_BACKGROUND_S, SentStep, StepPacing
from llama_core.errors import RankFailure
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import BACKGROUND, FinishReason, Sequence, Terms
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import AdapterLoad, Row, StepInput, StepOutput
from llama_core.scheduling.step_costs import StepShape
from llama_core.text.registry import load_tokenizer
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import EOS, continuation
from tests.support.loop_engine import LoopEngine
from tests.support.requests import submit
from tests.support.virtual_loop import VirtualLoop

LOOPS = {"virtual time": VirtualLoop}
TOKENIZER = load_tokenizer(GOLDEN / "mp1" / "tokenizer.model")
DECODE_S = 0.04
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def make(slots: int = 4) -> Scheduler:
    return Scheduler(SchedulerConfig(slots, 4000, frozenset({EOS})), BlockPool(1000, 16))


async def decode(sent_s: float, num_rows: int = 2, is_queued: bool = False, num_drafts: int = 0) -> SentStep:
    batch = StepInput(0, 1, [Row(slot, 9, 1 + num_drafts, True, num_drafts) for slot in range(num_rows)])
    output: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
    return SentStep(batch, output, StepShape.of(batch), sent_s, is_queued)


def taking(seconds: float) -> StepOutput:
    return StepOutput(0, 1, [5, 5], elapsed_ms=seconds * 1e3)


async def test_the_next_step_is_due_shortly_before_the_running_one_ends() -> None:
    scheduler = make()
    pacing = StepPacing(scheduler)
    assert scheduler.speculation.costs is pacing.costs
    assert pacing.due_s([], 100.0) is None, "no step runs"
    assert pacing.due_s([await decode(100.0)], 100.0) is None, "no step was measured"
    pacing.completed(await decode(100.0), taking(DECODE_S), 100.0 + DECODE_S)
    due_s = 100.0 + DECODE_S + DECODE_S - pacing.lead_s(DECODE_S)
    queued = await decode(100.01, is_queued=True)
    assert pacing.due_s([queued], 100.0 + DECODE_S) == pytest.approx(due_s), "the step began when the one before ended"
    assert pacing.due_s([queued], due_s) is None, "it is due"


async def test_a_step_that_loads_an_adapter_teaches_the_load_alone() -> None:
    pacing = StepPacing(make())
    pacing.completed(await decode(100.0), taking(DECODE_S), 100.0)
    before, step = pacing.costs.model(0.0), await decode(101.0)
    step.batch.adapters.append(AdapterLoad(1, "digest", "folder"))
    pacing.completed(step, taking(DECODE_S + 0.3), 101.4)
    after = pacing.costs.model(0.0)
    assert after.adapter_ms == pytest.approx(300.0) and dataclasses.replace(after, adapter_ms=0.0) == before


async def test_no_step_is_held_back_where_a_newcomer_could_not_join_it() -> None:
    scheduler = make(slots=1)
    pacing = StepPacing(scheduler)
    pacing.completed(await decode(100.0), taking(DECODE_S), 100.0)
    running = [await decode(100.0)]
    assert pacing.due_s(running, 100.0) is not None
    scheduler.add(Sequence([1, 5], SamplingParams(), 50))
    assert pacing.due_s(running, 100.0) is None, "a request waits already"
    scheduler.schedule()
    assert pacing.due_s(running, 100.0) is None, "no slot is free"


async def test_a_background_step_is_due_a_while_after_the_last_other_request() -> None:
    scheduler = make()
    pacing = StepPacing(scheduler)
    scheduler.add(Sequence([1, 5], SamplingParams(), 50, Terms(priority=BACKGROUND)))
    assert pacing.due_s([], 99.0) is None, "there was no other request"
    other = Sequence([1, 6], SamplingParams(), 50)
    scheduler.add(other)
    assert pacing.due_s([], 100.0) is None
    scheduler.finish(other, FinishReason.ABORT)
    due_s = 100.01 + HOLD_BACKGROUND_S
    assert (pacing.due_s([], 100.01), pacing.due_s([], 100.02), pacing.due_s([], due_s)) == (due_s, due_s, None)


class Timed(FakeGroup):
    """Reports the time that it takes for a step, and how many steps it began with the next one waiting."""

    num_followed = 0

    async def _compute(self, batch: StepInput) -> StepOutput:
        output = dataclasses.replace(await super()._compute(batch), elapsed_ms=self.step_s * 1e3)
        self.num_followed += self.in_flight > 1
        return output


class Held(NamedTuple):
    group: Timed
    engine: LoopEngine
    stream: SequenceStream
    running: asyncio.Task[None]


@asynccontextmanager
async def held(depth: int = 2, step_s: float = 0.2) -> AsyncIterator[Held]:
    """A loop over ranks with long steps; its first request has some tokens, and the next step is held back."""
    group = Timed(step_s=step_s)
    engine = LoopEngine(num_blocks=1000, max_waiting=None, slots=4, step_tokens=4000, max_seq_len=100, depth=depth)
    task = asyncio.create_task(engine.loop.run(group))
    stream = submit(engine, [1, 3], GREEDY)
    await until(lambda: len(stream.sequence.output) >= 3)
    try:
        yield Held(group, engine, stream, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_that_arrives_while_a_step_runs_joins_the_next_one() -> None:
    """Without the hold it would join the one after that: the next one would have been made when the running one began."""
    async with held() as (group, engine, _, _):
        running = len(group.steps)
        second = submit(engine, [1, 4], GREEDY)
        await until(lambda: second.sequence.output)
        joined = next(i for i, step in enumerate(group.steps) if len(step.rows) == 2)
        assert joined == running, "the step that runs was the last one made when the request arrived"


@pytest.mark.parametrize("depth", [2, 3])
async def test_ranks_that_complete_a_step_find_the_next_one_waiting(depth: int) -> None:
    async with held(depth, step_s=0.1) as (group, _, stream, _):
        group.num_followed, before = 0, len(group.steps)
        await until(lambda: len(stream.sequence.output) >= 23)
        assert group.num_followed >= len(group.steps) - before - 1, "a held step is sent before the running one ends"


async def test_a_client_s_next_request_finds_no_background_step_between() -> None:
    async with held(step_s=0.1) as (group, engine, stream, task):
        loop = asyncio.get_running_loop()
        background = submit(engine, [1, 4], GREEDY, priority=BACKGROUND)
        await read(stream)
        await asyncio.sleep(HOLD_BACKGROUND_S / 2)
        began_s, following = loop.time(), submit(engine, [1, 5], SamplingParams(temperature=0.0, max_tokens=2))
        await until(lambda: following.sequence.output)
        assert loop.time() - began_s == pytest.approx(group.step_s)
        assert not background.sequence.output and all(len(step.rows) == 1 for step in group.steps)
        await read(following)
        ended_s = loop.time()
        assert await read(background) == continuation([1, 4], 60, ignore_eos=True)
        assert loop.time() - ended_s >= HOLD_BACKGROUND_S + 60 * group.step_s
        assert not task.done()


@pytest.mark.parametrize("cause", ["a failed step", "a failed send", "a cancelled loop"])
async def test_a_failure_while_a_step_is_held_back_loses_no_token(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with held() as (group, engine, stream, task):
        reading = asyncio.create_task(read(stream))
        failure: RankFailure | None = RankFailure("rank 1 died")
        if cause == "a failed step":
            group.fail()
        elif cause == "a failed send":
            monkeypatch.setattr(group, "submit", refuse)
        else:
            failure = None
            task.cancel()
        with pytest.raises(RankFailure if failure else asyncio.CancelledError):
            await task
        engine.loop.restart(1, failure)
        engine.loop.resumed(64)
        again = asyncio.create_task(engine.loop.run(Timed()))
        assert await reading == continuation([1, 3], 60, ignore_eos=True)
        again.cancel()


def refuse(batch: StepInput) -> asyncio.Future[StepOutput]:
    raise RankFailure("rank 1 died")


async def read(stream: SequenceStream) -> list[int]:
    return [token async for delta in stream for token in delta.tokens]
