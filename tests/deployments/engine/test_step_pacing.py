"""The next step is made late enough for requests that arrive meanwhile, and early enough for the ranks."""

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from deployments.engine import engine_loop
from deployments.engine.engine_loop import EngineLoop
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.step_pacing import (
    CHUNK_S,
    LARGEST_FACTOR,
    LEAD_S,
    LEAD_SHARE,
    LEAST_PROMPT_TOKENS,
    LONGEST_STEP_S,
    SMALLEST_FACTOR,
    SentStep,
    StepPacing,
)
from llama_core.errors import RankFailure
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.prompt_budget import TOKENS_A_PROMPT, TOKENS_ALONE
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import Row, StepInput, StepOutput
from llama_core.scheduling.step_costs import StepShape
from llama_core.text.registry import load_tokenizer
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup
from tests.support.fake_ranks import EOS, continuation
from tests.support.requests import submit
from tests.support.virtual_loop import VirtualLoop

TOKENIZER = load_tokenizer(GOLDEN / "mp1" / "tokenizer.model")
DECODE_S = 0.04
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


class VirtualTime(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return VirtualLoop()


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loops of these tests: what they show depends on no clock and on no other load of the machine."""
    return VirtualTime()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time()))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.0001)


def make(slots: int = 4) -> Scheduler:
    return Scheduler(SchedulerConfig(slots, 4000, frozenset({EOS})), BlockPool(1000, 16))


async def decode(sent_s: float, num_rows: int = 2, is_queued: bool = False, num_drafts: int = 0) -> SentStep:
    batch = StepInput(0, 1, [Row(slot, 9, 1 + num_drafts, True, num_drafts) for slot in range(num_rows)])
    output: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
    return SentStep(batch, output, StepShape.of(batch), sent_s, is_queued)


async def prompt(num_tokens: int) -> SentStep:
    batch = StepInput(0, 1, [Row(0, 0, num_tokens, True)])
    return (await decode(0.0))._replace(batch=batch, shape=StepShape.of(batch))


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


async def test_the_lead_grows_until_few_steps_come_late_and_shrinks_while_none_does() -> None:
    pacing = StepPacing(make())
    assert pacing.lead_s(DECODE_S) == pytest.approx(LEAD_S + LEAD_SHARE * DECODE_S)
    for _ in range(500):
        pacing.learn_lead(0.01)
    assert pacing.lead_s(DECODE_S) == pytest.approx(SMALLEST_FACTOR * (LEAD_S + LEAD_SHARE * DECODE_S))
    needed_s, num_late = 0.012, 0
    for i in range(2000):
        spare_s = pacing.lead_s(DECODE_S) - needed_s * random.Random(i).uniform(0.5, 1.0)
        num_late += spare_s < 0
        pacing.learn_lead(spare_s)
    assert num_late < 200
    for _ in range(50):
        pacing.learn_lead(0.0)
    assert pacing.lead_s(DECODE_S) == pytest.approx(LARGEST_FACTOR * (LEAD_S + LEAD_SHARE * DECODE_S))


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


async def test_short_steps_are_never_held_back() -> None:
    pacing = StepPacing(make())
    pacing.completed(await decode(100.0), taking(LEAD_S), 100.0)
    assert pacing.due_s([await decode(100.0)], 100.0) is None


async def test_the_gap_between_steps_is_measured_where_the_ranks_had_no_further_step() -> None:
    pacing = StepPacing(make())
    pacing.completed(await decode(100.0), taking(DECODE_S), 200.0)
    first = pacing.costs.gap_ms
    assert first is not None, "the ranks were idle before: a share of the decode"
    pacing.completed(await decode(200.0, is_queued=True), taking(DECODE_S), 201.0)
    assert pacing.costs.gap_ms == first, "the step waited for another"
    now_s = 201.0
    for _ in range(100):
        now_s += 0.003 + DECODE_S  # 1 ms until it is sent, and 2 ms more until it begins
        pacing.completed(await decode(now_s - 0.002 - DECODE_S), taking(DECODE_S), now_s)
    assert pacing.costs.gap_ms == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize(("tokens_a_second", "longest"), [(1000.0, 1000 * LONGEST_STEP_S), (10.0, LEAST_PROMPT_TOKENS)])
async def test_steps_that_read_prompts_are_as_long_as_the_ranks_are_fast(
    tokens_a_second: float, longest: float
) -> None:
    scheduler = make()
    pacing = StepPacing(scheduler)
    assert scheduler.prompt_budget.max_tokens == TOKENS_ALONE, "no step has been measured"
    pacing.completed(await decode(0.0, 300), taking(1000.0), 1000.0)
    assert scheduler.prompt_budget.max_tokens == TOKENS_ALONE, "decode steps give no prefill rate"
    pacing.completed(await prompt(400), taking(400 / tokens_a_second), 2000.0)
    assert scheduler.prompt_budget.max_tokens == longest
    pacing.completed(await prompt(LEAST_PROMPT_TOKENS), taking(LEAST_PROMPT_TOKENS / 200.0), 3000.0)
    assert scheduler.prompt_budget.max_tokens == 200 * LONGEST_STEP_S, (
        "the limit of slow ranks grows again when they are faster"
    )


@pytest.mark.parametrize(("tokens_a_second", "chunk"), [(1000.0, TOKENS_A_PROMPT), (40_000.0, 40_000 * CHUNK_S)])
async def test_fast_ranks_are_given_longer_chunks_of_prompts(tokens_a_second: float, chunk: float) -> None:
    scheduler = make()
    StepPacing(scheduler).completed(await prompt(400), taking(400 / tokens_a_second), 2000.0)
    assert scheduler.prompt_budget.chunk == chunk


async def test_steps_that_deferred_rows_without_a_wait_are_measured() -> None:
    pacing = StepPacing(make())
    for _ in range(50):
        late = StepOutput(0, 1, [5, 5], elapsed_ms=DECODE_S * 1e3, deferred=[1], mask_wait_ms=0.0)
        pacing.completed(await decode(100.0), late, 100.0)
    assert pacing.costs.decode_ms(2) == pytest.approx(DECODE_S * 1e3)


async def test_a_step_that_waited_for_masks_teaches_no_lead() -> None:
    """It ended later than its costs say, so a next step that was sent in time seems to have been sent early."""
    pacing = StepPacing(make())
    before_s = pacing.lead_s(0.01)
    for output in (taking(DECODE_S), StepOutput(0, 1, [5], elapsed_ms=60.0, mask_wait_ms=50.0)):
        pacing.completed(await decode(0.0), output, 1.0)
        learned_s = pacing.lead_s(0.01)
        pacing.learn_lead(0.05)
        changed = pacing.lead_s(0.01) != learned_s
        assert changed == (output.mask_wait_ms is None)
    assert pacing.lead_s(0.01) < before_s


@pytest.mark.parametrize("is_measured", [True, False], ids=["measured", "not measured"])
async def test_the_wait_for_masks_makes_neither_steps_nor_drafts_expensive(is_measured: bool) -> None:
    scheduler = make()
    pacing = StepPacing(scheduler)
    pacing.completed(await decode(0.0), taking(DECODE_S), 100.0)
    pacing.completed(await prompt(400), taking(DECODE_S + 0.1), 200.0)
    costs = pacing.costs
    shapes = StepShape(2, 0, 0), StepShape(2, 0, 4), StepShape(2, 400, 0)
    before_ms, chunk = [costs.step_ms(shape) for shape in shapes], scheduler.prompt_budget.chunk
    for _ in range(100):
        for step in (await decode(300.0), await decode(300.0, num_drafts=4), await prompt(400)):
            expected_ms = costs.step_ms(step.shape)
            assert expected_ms is not None
            elapsed_ms = expected_ms + 50.0
            if is_measured:
                late = StepOutput(0, 1, [5, 5], elapsed_ms=elapsed_ms, mask_wait_ms=50.0)
            else:
                late = StepOutput(0, 1, [5, 5], elapsed_ms=elapsed_ms, deferred=[1])
            pacing.completed(step, late, 400.0)
    assert [costs.step_ms(shape) for shape in shapes] == pytest.approx(before_ms, rel=0.01)
    assert scheduler.prompt_budget.chunk == pytest.approx(chunk, rel=0.01)


class Timed(FakeGroup):
    """Reports the time that it takes for a step, and how many steps it began with the next one waiting."""

    num_followed = 0

    async def _compute(self, batch: StepInput) -> StepOutput:
        output = dataclasses.replace(await super()._compute(batch), elapsed_ms=self.step_s * 1e3)
        self.num_followed += self.in_flight > 1
        return output


class Held(NamedTuple):
    group: Timed
    loop: EngineLoop
    stream: SequenceStream
    running: asyncio.Task[None]


@asynccontextmanager
async def held(depth: int = 2, step_s: float = 0.2) -> AsyncIterator[Held]:
    """A loop over ranks with long steps; its first request has some tokens, and the next step is held back."""
    group = Timed(step_s=step_s)
    loop = EngineLoop(make(), TOKENIZER, max_seq_len=100, pipeline_depth=depth)
    task = asyncio.create_task(loop.run(group))
    stream = submit(loop, [1, 3], GREEDY)
    await until(lambda: len(stream.sequence.output) >= 3)
    try:
        yield Held(group, loop, stream, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_request_that_arrives_while_a_step_runs_joins_the_next_one() -> None:
    """Without the hold it would join the one after that: the next one would have been made when the running one began."""
    async with held() as (group, loop, _, _):
        running = len(group.steps)
        second = submit(loop, [1, 4], GREEDY)
        await until(lambda: second.sequence.output)
        joined = next(i for i, step in enumerate(group.steps) if len(step.rows) == 2)
        assert joined == running, "the step that runs was the last one made when the request arrived"


@pytest.mark.parametrize("depth", [2, 3])
async def test_ranks_that_complete_a_step_find_the_next_one_waiting(depth: int) -> None:
    async with held(depth, step_s=0.1) as (group, _, stream, _):
        group.num_followed, before = 0, len(group.steps)
        await until(lambda: len(stream.sequence.output) >= 23)
        assert group.num_followed >= len(group.steps) - before - 1, "a held step is sent before the running one ends"


async def test_a_step_that_ends_early_is_followed_at_once() -> None:
    """The timer of a held step never delays the one after an output."""
    async with held() as (group, _, stream, _):
        group.step_s = 0.0
        began = asyncio.get_running_loop().time()
        await until(lambda: len(stream.sequence.output) >= 40)
        assert asyncio.get_running_loop().time() - began < 0.25, "one step was long still"


@pytest.mark.parametrize("cause", ["a failed step", "a failed send", "a cancelled loop"])
async def test_a_failure_while_a_step_is_held_back_loses_no_token(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with held() as (group, loop, stream, task):
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
        loop.restart(1, failure)
        loop.resumed(64)
        again = asyncio.create_task(loop.run(Timed()))
        assert await reading == continuation([1, 3], 60, ignore_eos=True)
        again.cancel()


async def test_an_abort_while_a_step_is_held_back_frees_its_blocks_and_lets_the_loop_drain() -> None:
    async with held() as (_, loop, stream, _):
        stream.cancel()
        assert loop.scheduler.pool.num_used == 0
        assert await loop.drain(10)


def refuse(batch: StepInput) -> asyncio.Future[StepOutput]:
    raise RankFailure("rank 1 died")


async def read(stream: SequenceStream) -> list[int]:
    return [token async for delta in stream for token in delta.tokens]
