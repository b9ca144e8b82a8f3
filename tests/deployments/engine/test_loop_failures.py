"""The engine loop when ranks die or one request fails: which streams end, and what new ranks compute again."""

import asyncio

import pytest

from deployments.engine.engine_loop import EngineLoop
from deployments.engine.step_report import StepStats
from llama_core.errors import EngineError, NonFiniteLogits, RankFailure
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import EOS, continuation
from tests.support.requests import submit
from tests.support.running_loop import TOKENIZER, greedy, read, running


async def test_a_dead_rank_ends_every_stream_once_with_one_clear_error() -> None:
    group = FakeGroup(step_s=0.002, token=lambda tokens: 5)
    async with running(group, slots=2) as loop:
        streams = [submit(loop, [1, 3 + i], greedy(60)) for i in range(5)]
        before = await anext(streams[0])
        group.fail("rank 1 (pid 7) died")
        for stream in streams:
            with pytest.raises(RankFailure, match=r"rank 1 \(pid 7\) died"):
                await read(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert before.tokens and loop.scheduler.pool.num_used == 0 and not loop.scheduler.num_waiting
        with pytest.raises(RankFailure):
            submit(loop, [1, 3], greedy())
        assert loop.num_live == 0 and await loop.drain(10.0)


async def test_tokens_from_before_a_failure_can_still_be_read() -> None:
    group = FakeGroup(step_s=0.001, token=lambda tokens: 5)
    async with running(group) as loop:
        stream = submit(loop, [1, 3], greedy(90))
        await until(lambda: len(stream.sequence.output) > 1)
        group.fail()
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert len((await anext(stream)).tokens) == len(stream.sequence.output) > 1
        with pytest.raises(RankFailure):
            await anext(stream)


async def test_non_finite_values_end_only_their_request() -> None:
    group = FakeGroup(token=lambda tokens: 5)
    group.ranks.non_finite_at = (1, 6)
    stats: list[StepStats] = []
    async with running(group, stats=stats) as loop:
        streams = [submit(loop, [1, 3], greedy(10)) for _ in range(3)]
        results = await asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)
        assert isinstance(results[1], NonFiniteLogits)
        assert [result[1] for result in (results[0], results[2])] == [[5] * 10] * 2  # type: ignore[index]
        assert sum(step.num_non_finite for step in stats) == 1
        assert loop.scheduler.pool.num_used == 0


@pytest.mark.parametrize(("part", "method"), [("_detokenizer", "push_one"), ("_stop", "push")])
async def test_an_exception_while_decoding_one_requests_text_fails_only_that_request(
    monkeypatch: pytest.MonkeyPatch, part: str, method: str
) -> None:
    group = FakeGroup(token=lambda tokens: 5)
    async with running(group, slots=8) as loop:
        streams = [submit(loop, [1, 3], greedy(10), stop=["never"]) for _ in range(8)]

        def broken(given: object) -> str:
            raise RuntimeError("injected")

        monkeypatch.setattr(getattr(streams[3], part), method, broken)
        results = await asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)
        assert isinstance(results[3], EngineError)
        assert all(result[1] == [5] * 10 for i, result in enumerate(results) if i != 3)  # type: ignore[index]
        assert loop.scheduler.pool.num_used == 0


@pytest.mark.parametrize("depth", [1, 2])
async def test_tokens_of_the_last_step_are_delivered_when_the_next_step_cannot_be_sent(depth: int) -> None:
    class Dying(FakeGroup):
        def submit(self, batch: StepInput) -> asyncio.Future[StepOutput]:
            if len(self.steps) == 6:
                raise RankFailure("rank 1 died")
            return super().submit(batch)

    scheduler = Scheduler(SchedulerConfig(4, 16, frozenset({EOS})), BlockPool(64, 16))
    loop = EngineLoop(scheduler, TOKENIZER, max_seq_len=100, pipeline_depth=depth)
    prompts = [[1, *range(3, 4 + n)] for n in range(4)]
    streams = [submit(loop, prompt, greedy(30)) for prompt in prompts]
    reading = asyncio.gather(*(read(stream) for stream in streams))
    failure = RankFailure("")
    try:
        await loop.run(Dying())
    except RankFailure as error:
        failure = error
    loop.restart(1, failure)
    running_second = asyncio.create_task(loop.run(FakeGroup()))
    results = await reading
    running_second.cancel()
    assert [tokens for _, tokens, _ in results] == [continuation(prompt, 30) for prompt in prompts]
    assert [text for text, _, _ in results] == [TOKENIZER.decode(continuation(prompt, 30)) for prompt in prompts]


async def test_the_replacement_of_ranks_loses_and_repeats_no_token() -> None:
    """Recovery: streams outlive their runner, and the scheduler recomputes them from their tokens."""
    first = FakeGroup(step_s=0.001)
    loop = EngineLoop(
        Scheduler(SchedulerConfig(4, 16, frozenset({EOS})), BlockPool(64, 16)), TOKENIZER, max_seq_len=100
    )
    prompts = [[1, *range(3, 4 + n)] for n in range(9)]
    streams = [submit(loop, prompt, greedy(30)) for prompt in prompts]
    reading = asyncio.gather(*(read(stream) for stream in streams))
    running_first = asyncio.create_task(loop.run(first))
    await until(lambda: any(stream.sequence.output for stream in streams))
    first.fail()
    with pytest.raises(RankFailure):
        await running_first
    assert any(stream.sequence.output for stream in streams) and not reading.done()
    loop.scheduler.restart(epoch=1)
    running_second = asyncio.create_task(loop.run(FakeGroup()))
    results = await reading
    running_second.cancel()
    assert [tokens for _, tokens, _ in results] == [continuation(prompt, 30) for prompt in prompts]
    assert [text for text, _, _ in results] == [TOKENIZER.decode(continuation(prompt, 30)) for prompt in prompts]


async def test_new_ranks_first_compute_a_canary_in_the_name_of_the_quarantined_requests_owner() -> None:
    scheduler = Scheduler(SchedulerConfig(2, 16, frozenset({EOS})), BlockPool(64, 16))
    loop = EngineLoop(scheduler, TOKENIZER, max_seq_len=100)
    submit(loop, [1, 3, 4], greedy(20), owner="a")
    for epoch in (1, 2):
        assert scheduler.quarantine.canary is None and scheduler.schedule() is not None
        loop.restart(epoch, RankFailure("rank 1 died", rank=1))
    step = scheduler.schedule()
    assert step is not None and len(step.rows) == 1 and loop._is_canary(step), (
        "the quarantined request waits for the canary"
    )
    scheduler.commit(StepOutput(2, step.step, [5]))
    assert scheduler.admission.waiting._classes[0].counters.keys() == {"a"}
