"""The engine loop: every stream gets its own text, when its reader takes it, and ends exactly once."""

import asyncio

import pytest

from deployments.engine.step_report import StepStats
from llama_core.config import MAX_DRAFTS
from llama_core.errors import NotReady, RankFailure, RequestCancelled
from llama_core.scheduling.request import FinishReason
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.loop_engine import TOKENIZER, greedy, read, running
from tests.support.requests import submit
from tests.support.virtual_loop import VirtualLoop

LOOPS = {"virtual time": VirtualLoop}


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_concurrent_streams_each_get_their_own_text(depth: int) -> None:
    group = FakeGroup(block_size=4)
    stats: list[StepStats] = []
    async with running(group, depth=depth, on_step=stats.append) as loop:
        prompts = [[1, *range(3, 4 + n)] for n in range(20)]
        streams = [submit(loop, prompt, greedy()) for prompt in prompts]
        results = await asyncio.gather(*(read(stream) for stream in streams))
        assert loop.scheduler.pool.num_used == 0
    assert group.max_in_flight <= depth
    for prompt, (text, tokens, reason) in zip(prompts, results, strict=True):
        expected = continuation(prompt, 20)
        assert tokens == expected and text == TOKENIZER.decode(expected)
        assert reason is (FinishReason.LENGTH if len(expected) == 20 else FinishReason.STOP)
    num_intervals = sum(num_tokens for step in stats for _, num_tokens in step.token_intervals)
    assert num_intervals == sum(len(tokens[1:]) for _, tokens, _ in results)


async def test_the_first_token_leaves_at_once_and_a_slow_reader_gets_the_others_together() -> None:
    group = FakeGroup(step_s=0.002, token=lambda tokens: 5)
    async with running(group) as loop:
        stream = submit(loop, [1, 3], greedy(40))
        first = await anext(stream)
        assert len(first.tokens) == 1
        await until(lambda: len(stream.sequence.output) > 10)
        second = await anext(stream)
        assert len(second.tokens) > 5


@pytest.mark.parametrize("when", ["queued", "in prefill", "in decode"])
async def test_a_cancelled_request_frees_its_blocks_at_once_and_is_never_scheduled_again(when: str) -> None:
    group = FakeGroup(step_s=0.001, token=lambda tokens: 5)
    async with running(group, slots=1) as loop:
        other = submit(loop, [1, 4], greedy(30)) if when == "queued" else None
        stream = submit(loop, list(range(1, 60)) if when == "in prefill" else [1, 3], greedy(35))
        await asyncio.sleep(0.005)
        if when == "in decode":
            await anext(stream)
        used = loop.scheduler.pool.num_used
        stream.cancel()
        stream.cancel()
        if other is None:
            assert used > 0
            assert loop.scheduler.pool.num_used == 0
        with pytest.raises(RequestCancelled):
            await read(stream)
        await asyncio.sleep(0)  # a step made before the cancellation is sent only now
        steps = len(group.steps)
        if other is None:
            await asyncio.sleep(0.01)
            assert len(group.steps) == steps, "a step without a request"
        else:
            assert (await read(other))[2] is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
async def test_streams_with_drafts_get_their_own_text_and_are_counted(depth: int) -> None:
    stats: list[StepStats] = []
    group = FakeGroup(token=lambda tokens: 5 + (tokens[-1] + len(tokens) // 40) % 7)
    async with running(group, depth=depth, on_step=stats.append, max_drafts=MAX_DRAFTS) as loop:
        prompts = [[1, 3 + i] for i in range(3)]
        streams = [submit(loop, prompt, greedy(80)) for prompt in prompts]
        results = await asyncio.gather(*(read(stream) for stream in streams))
        drafts, accepted = loop.scheduler.speculation.num_drafts, loop.scheduler.speculation.num_accepted
    for prompt, (_, tokens, _) in zip(prompts, results, strict=True):
        assert tokens == continuation(prompt, 80, lambda tokens: 5 + (tokens[-1] + len(tokens) // 40) % 7)
    assert sum(step.num_sampled for step in stats) == 3 * 80
    assert (
        sum(step.num_drafts for step in stats) == drafts > sum(step.num_drafts_accepted for step in stats) == accepted
    )
    assert accepted > 60 and len(stats) < 80
    token_s = sum(seconds * num_tokens for step in stats for seconds, num_tokens in step.token_intervals)
    assert token_s == pytest.approx(sum(stream.timeline.decode_s or 0.0 for stream in streams))


async def test_a_second_request_reuses_cached_blocks_and_the_hits_are_counted() -> None:
    stats: list[StepStats] = []
    async with running(FakeGroup(), on_step=stats.append) as loop:
        prompt = [1, *range(10, 60)]
        first = submit(loop, prompt, greedy(4))
        expected = await read(first)
        again = submit(loop, prompt, greedy(4))
        assert await read(again) == expected
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    assert sum(step.num_prompt_hits for step in stats) == 48


async def test_a_stall_is_detected_and_an_idle_loop_is_not_stalled() -> None:
    group = FakeGroup()
    async with running(group) as loop:
        await asyncio.sleep(10)
        assert loop.loop.stalled_s() == 0.0
        group.go.clear()
        stream = submit(loop, [1, 3], greedy(20))
        assert loop.loop.stalled_s() == 0.0, "idle time is no stall"
        await asyncio.sleep(3)
        assert loop.loop.stalled_s() == 3.0
        group.go.set()
        await read(stream)
        assert loop.loop.stalled_s() == 0.0


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
        with pytest.raises(NotReady, match="died"):
            submit(loop, [1, 3], greedy())
        assert loop.num_live == 0 and await loop.loop.drain(10.0)
