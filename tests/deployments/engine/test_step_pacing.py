"""The next step is made late enough for requests that arrive meanwhile, and early enough for the ranks."""

import asyncio
import dataclasses

import pytest

from deployments.engine.engine_loop import EngineLoop
from deployments.engine.step_pacing import LEAD_S, LEAD_SHARE, LONGEST_STEP_S, SentStep, StepPacing
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import TOKENS_A_PROMPT, TOKENS_ALONE, Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import Row, StepInput, StepOutput
from llama_core.scheduling.step_costs import StepShape
from llama_core.text.registry import load_tokenizer
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import EOS

TOKENIZER = load_tokenizer(GOLDEN / "mp1" / "tokenizer.model")
DECODE_S = 0.04


def make(slots: int = 4) -> Scheduler:
    return Scheduler(SchedulerConfig(slots, 4000, frozenset({EOS})), BlockPool(1000, 16))


async def decode(sent_s: float, num_rows: int = 2, is_queued: bool = False) -> SentStep:
    batch = StepInput(0, 1, [Row(slot, 9, 1, True) for slot in range(num_rows)])
    output: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
    return SentStep(batch, output, StepShape.of(batch), sent_s, is_queued)


def taking(seconds: float) -> StepOutput:
    return StepOutput(0, 1, [5, 5], elapsed_ms=seconds * 1e3)


async def test_the_next_step_is_due_shortly_before_the_running_one_ends() -> None:
    pacing = StepPacing(make())
    assert pacing.due_s([], 100.0) is None, "no step runs"
    assert pacing.due_s([await decode(100.0)], 100.0) is None, "no step was measured"
    pacing.completed(await decode(100.0), taking(DECODE_S), 100.0 + DECODE_S)
    due_s = 100.0 + DECODE_S + DECODE_S * (1 - LEAD_SHARE) - LEAD_S
    queued = await decode(100.01, is_queued=True)
    assert pacing.due_s([queued], 100.0 + DECODE_S) == pytest.approx(due_s), "the step began when the one before ended"
    assert pacing.due_s([queued], due_s) is None, "it is due"


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
    assert pacing.costs.gap_ms is None, "the ranks were idle before"
    pacing.completed(await decode(200.0, is_queued=True), taking(DECODE_S), 201.0)
    assert pacing.costs.gap_ms is None, "the step waited for another"
    pacing.completed(await decode(201.001), taking(DECODE_S), 201.003 + DECODE_S)
    assert pacing.costs.gap_ms == pytest.approx(2.0)


@pytest.mark.parametrize(("tokens_a_second", "longest"), [(1000.0, 1000 * LONGEST_STEP_S), (10.0, TOKENS_A_PROMPT)])
async def test_steps_that_read_prompts_are_as_long_as_the_ranks_are_fast(
    tokens_a_second: float, longest: float
) -> None:
    scheduler = make()
    pacing = StepPacing(scheduler)
    assert scheduler.max_prompt_tokens == TOKENS_ALONE, "no step has been measured"
    pacing.completed(await decode(0.0, 300), taking(1000.0), 1000.0)
    assert scheduler.max_prompt_tokens == TOKENS_ALONE, "decode steps give no prefill rate"
    batch = StepInput(0, 1, [Row(0, 0, 400, True)])
    step = (await decode(0.0))._replace(batch=batch, shape=StepShape.of(batch))
    pacing.completed(step, taking(400 / tokens_a_second), 2000.0)
    assert scheduler.max_prompt_tokens == longest


class Timed(FakeGroup):
    """Reports the time that it takes for a step."""

    async def _compute(self, batch: StepInput) -> StepOutput:
        return dataclasses.replace(await super()._compute(batch), elapsed_ms=self.step_s * 1e3)


async def test_a_request_that_arrives_while_a_step_runs_joins_the_next_one() -> None:
    """Without the hold it would join the one after that: the next one would have been made when the running one began."""
    group = Timed(step_s=0.2)
    loop = EngineLoop(make(), TOKENIZER, max_seq_len=100)
    task = asyncio.create_task(loop.run(group))
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    first = loop.submit([1, 3], greedy)
    await until(lambda: len(first.sequence.output) >= 3)
    running = len(group.steps)
    second = loop.submit([1, 4], greedy)
    await until(lambda: second.sequence.output)
    joined = next(i for i, step in enumerate(group.steps) if len(step.rows) == 2)
    assert joined == running, "the step that runs was the last one made when the request arrived"
    assert group.max_in_flight == 2, "the ranks found the next step waiting"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_step_that_ends_early_is_followed_at_once() -> None:
    """The timer of a held step never delays the one after an output."""
    group = Timed(step_s=0.2)
    loop = EngineLoop(make(), TOKENIZER, max_seq_len=100)
    task = asyncio.create_task(loop.run(group))
    stream = loop.submit([1, 3], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    await until(lambda: len(stream.sequence.output) >= 3)
    group.step_s = 0.0
    began = asyncio.get_running_loop().time()
    await until(lambda: len(stream.sequence.output) >= 40)
    assert asyncio.get_running_loop().time() - began < 37 * 0.1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
