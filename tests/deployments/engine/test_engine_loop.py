"""The engine loop: every stream gets its own text and ends exactly once."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from deployments.engine.engine_loop import EngineLoop
from deployments.engine.retry_after import SHORTEST_RETRY_S
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.step_stats import StepStats
from llama_core.config import MAX_DRAFTS
from llama_core.errors import (
    EngineError,
    InvalidParameter,
    NonFiniteLogits,
    NotReady,
    QueueFull,
    RankFailure,
    RequestCancelled,
)
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import FinishReason
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput
from llama_core.text.registry import load_tokenizer
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import EOS, continuation

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
    text, tokens, reason = "", [], None
    async for delta in stream:
        assert reason is None, "a delta after the end"
        text += delta.text
        tokens += delta.tokens
        reason = delta.finish_reason
    return text, tokens, reason


def greedy(max_tokens: int = 20, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_concurrent_streams_each_get_their_own_text(depth: int) -> None:
    group = FakeGroup(block_size=4)
    async with running(group, depth=depth) as loop:
        prompts = [[1, *range(3, 4 + n)] for n in range(20)]
        streams = [loop.submit(prompt, greedy()) for prompt in prompts]
        results = await asyncio.gather(*(read(stream) for stream in streams))
        assert loop.scheduler.pool.num_used == 0
    assert group.max_in_flight <= depth
    for prompt, (text, tokens, reason) in zip(prompts, results, strict=True):
        expected = continuation(prompt, 20)
        assert tokens == expected and text == TOKENIZER.decode(expected)
        assert reason is (FinishReason.LENGTH if len(expected) == 20 else FinishReason.STOP)


async def test_the_next_step_is_sent_before_the_last_one_is_answered() -> None:
    group = FakeGroup(step_s=0.002, token=lambda tokens: 5)
    async with running(group) as loop:
        await read(loop.submit([1, 3], greedy(30)))
    assert group.max_in_flight == 2


async def test_the_first_token_leaves_at_once_and_a_slow_reader_gets_the_others_together() -> None:
    group = FakeGroup(step_s=0.002, token=lambda tokens: 5)
    async with running(group) as loop:
        stream = loop.submit([1, 3], greedy(40))
        first = await anext(stream)
        assert len(first.tokens) == 1
        await until(lambda: len(stream.sequence.output) > 10)
        second = await anext(stream)
        assert len(second.tokens) > 5


async def test_a_reader_is_woken_once_until_it_takes() -> None:
    group = FakeGroup(step_s=0.002, token=lambda tokens: 9 + len(tokens))  # no repetition, no drafts
    async with running(group) as loop:
        stream = loop.submit([1, 3], greedy(40))
        calls: list[int] = []
        stream.listen(lambda: calls.append(len(group.steps)))
        await until(lambda: len(stream.sequence.output) > 10)
        assert len(calls) == 1
        first = stream.take()
        assert first is not None and len(first.tokens) > 5
        assert stream.take() is None
        await until(lambda: len(stream.sequence.output) > 25)
        assert len(calls) == 2
        stream.listen(lambda: calls.append(-1))
        assert calls[2:] == [-1], "a late reader is woken at once"


async def test_a_reader_is_woken_once_more_when_the_stream_ends() -> None:
    group = FakeGroup(step_s=0.002, token=lambda tokens: 9 + len(tokens))
    async with running(group) as loop:
        stream = loop.submit([1, 3], greedy(20))
        ended: list[bool] = []
        stream.listen(lambda: ended.append(stream.ended))
        await until(lambda: stream.sequence.finish_reason is not None)
        await until(lambda: len(ended) == 2)
        assert ended == [False, True]
        delta = stream.take()
        assert delta is not None and delta.finish_reason is not None and stream.take() is None


async def test_the_next_step_is_sent_before_the_readers_get_the_last_steps_tokens() -> None:
    group = FakeGroup(step_s=0.001, token=lambda tokens: 9 + len(tokens))  # no repetition, no drafts
    async with running(group) as loop:
        stream = loop.submit([1, 3], greedy(20))
        sent: list[tuple[int, int]] = []
        ended = asyncio.Event()

        def on_news() -> None:
            delta = stream.take()
            assert delta is not None
            sent.append((len(stream.sequence.output), loop.scheduler.num_in_flight))
            if delta.finish_reason is not None:
                ended.set()

        stream.listen(on_news)
        await ended.wait()
    assert [num_tokens for num_tokens, _ in sent] == list(range(1, 21))
    assert all(num_in_flight == 2 for num_tokens, num_in_flight in sent if num_tokens <= 18)


@pytest.mark.parametrize("when", ["queued", "in prefill", "in decode"])
async def test_a_cancelled_request_frees_its_blocks_at_once_and_is_never_scheduled_again(when: str) -> None:
    group = FakeGroup(step_s=0.001, token=lambda tokens: 5)
    async with running(group, slots=1) as loop:
        other = loop.submit([1, 4], greedy(30)) if when == "queued" else None
        stream = loop.submit(list(range(1, 60)) if when == "in prefill" else [1, 3], greedy(35))
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


async def test_a_stop_string_across_tokens_ends_the_stream_and_is_left_out() -> None:
    words = TOKENIZER.encode("one two three four", bos=False, eos=False)
    group = FakeGroup(token=lambda tokens: words[(len(tokens) - 2) % len(words)])
    async with running(group) as loop:
        text, _, reason = await read(loop.submit([1, 3], greedy(40), stop=["o thr"]))
        assert text == "one tw" and reason is FinishReason.STOP
        assert loop.scheduler.pool.num_used == 0
        text, _, reason = await read(loop.submit([1, 3], greedy(len(words)), stop=["four"]))
        assert text == "one two three " and reason is FinishReason.STOP, (
            "a stop string at the token limit counts as a stop"
        )


@pytest.mark.parametrize("max_drafts", [0, MAX_DRAFTS])
async def test_tokens_of_one_step_behind_a_stop_string_are_removed(max_drafts: int) -> None:
    words = TOKENIZER.encode("one two three four", bos=False, eos=False)

    def rounds(tokens: list[int]) -> int:
        """Repeats the words six times, so that drafts are right, then continues with others."""
        if len(tokens) >= 2 + 6 * len(words):
            return TOKENIZER.encode("e", bos=False, eos=False)[0]
        return words[(len(tokens) - 2) % len(words)]

    group = FakeGroup(token=rounds)
    async with running(group, max_drafts=max_drafts) as loop:
        stream = loop.submit([1, 3], greedy(90, logprobs=0), stop=["four e"])
        deltas = [delta async for delta in stream]
        tokens = [token for delta in deltas for token in delta.tokens]
        logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
        assert "".join(delta.text for delta in deltas) == ("one two three four " * 6).removesuffix("four ")
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert tokens == stream.sequence.output == continuation([1, 3], len(tokens), rounds)
        assert len(tokens) == 6 * len(words) + 1, "the token that completed the stop string is the last"
        assert [logprob.logprob for logprob in logprobs] == list(range(2, 2 + len(tokens)))
        assert loop.scheduler.pool.num_used == 0
        assert (loop.scheduler.num_drafts_accepted > 0) == (max_drafts > 0)


@pytest.mark.parametrize("max_drafts", [0, MAX_DRAFTS])
async def test_an_included_stop_token_has_its_text_and_logprob(max_drafts: int) -> None:
    words = TOKENIZER.encode("one two three four" * 5, bos=False, eos=False)
    group = FakeGroup(token=lambda tokens: [*words, 3, EOS][min(len(tokens) - 2, len(words) + 1)])
    for included in (False, True):
        async with running(group, max_drafts=max_drafts) as loop:
            params = greedy(90, logprobs=0, stop_token_ids=(3,), include_stop_str_in_output=included)
            stream = loop.submit([1, 3], params)
            deltas = [delta async for delta in stream]
            tokens = [token for delta in deltas for token in delta.tokens]
            assert tokens == words + [3] * included
            assert "".join(delta.text for delta in deltas) == TOKENIZER.decode(tokens)
            assert len([logprob for delta in deltas for logprob in delta.logprobs]) == len(tokens)
            assert deltas[-1].finish_reason is FinishReason.STOP and stream.stop_reason == 3
            stopped = loop.submit([1, 3], replace(params, stop_token_ids=()), stop=["o thr"])
            assert (await read(stopped))[0] == ("one two thr" if included else "one tw")
            assert stopped.stop_reason == "o thr"
            ended = loop.submit([1, 3], replace(params, stop_token_ids=()))
            await read(ended)
            assert ended.finish_reason is FinishReason.STOP and ended.stop_reason is None
            assert loop.scheduler.pool.num_used == 0


async def test_a_stop_string_wins_over_an_end_or_an_error_behind_it_in_the_same_step() -> None:
    """The stop string counts even if an end or a value that is not finite follows it in the same step."""
    group = FakeGroup(token=lambda tokens: 5 if len(tokens) < 30 else EOS)
    piece = TOKENIZER.decode([5])
    for non_finite_at in (None, (0, 21)):
        group.ranks.non_finite_at = non_finite_at
        async with running(group, max_drafts=MAX_DRAFTS) as loop:
            stream = loop.submit([1, 3], greedy(60), stop=[piece * 16])
            _, tokens, reason = await read(stream)
            assert reason is FinishReason.STOP and stream.sequence.error is None
            assert len(tokens) == 16 and loop.scheduler.num_drafts_accepted > 0


@pytest.mark.parametrize("depth", [1, 2])
async def test_streams_with_drafts_get_their_own_text_and_are_counted(depth: int) -> None:
    stats: list[StepStats] = []
    group = FakeGroup(token=lambda tokens: 5 + (tokens[-1] + len(tokens) // 40) % 7)
    async with running(group, depth=depth, stats=stats, max_drafts=MAX_DRAFTS) as loop:
        prompts = [[1, 3 + i] for i in range(3)]
        results = await asyncio.gather(*(read(loop.submit(prompt, greedy(80))) for prompt in prompts))
        drafts, accepted = loop.scheduler.num_drafts, loop.scheduler.num_drafts_accepted
    for prompt, (_, tokens, _) in zip(prompts, results, strict=True):
        assert tokens == continuation(prompt, 80, lambda tokens: 5 + (tokens[-1] + len(tokens) // 40) % 7)
    assert sum(step.num_sampled for step in stats) == 3 * 80
    assert (
        sum(step.num_drafts for step in stats) == drafts > sum(step.num_drafts_accepted for step in stats) == accepted
    )
    assert accepted > 60 and len(stats) < 80


async def test_a_second_request_reuses_cached_blocks_and_the_hits_are_counted() -> None:
    stats: list[StepStats] = []
    async with running(FakeGroup(), stats=stats) as loop:
        prompt = [1, *range(10, 60)]
        first = loop.submit(prompt, greedy(4))
        expected = await read(first)
        again = loop.submit(prompt, greedy(4))
        assert await read(again) == expected
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    assert sum(step.num_prefix_hits for step in stats) == 48


async def test_a_prompt_is_checked_once_for_all_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[list[int]] = []

    def check(prompt: list[int], vocab_size: int, max_seq_len: int) -> list[int]:
        checked.append(prompt)
        return list(prompt)

    monkeypatch.setattr("deployments.engine.engine_loop.check_prompt", check)
    async with running(FakeGroup()) as loop:
        first, second = [1, 3], [1, 4]
        choices = [(prompt, greedy(2)) for prompt in (first, first, second, second, [1, 3])]
        streams = loop.submit_all(choices)
        assert [stream.prompt_tokens for stream in streams] == [prompt for prompt, _ in choices]
        for stream in streams:
            await read(stream)
    assert checked == [first, second, [1, 3]]


async def test_min_tokens_that_the_context_has_no_room_for_are_refused() -> None:
    async with running(FakeGroup()) as loop:
        for min_tokens, room in ((6, 5), (8, 7)):
            with pytest.raises(InvalidParameter, match=f"at most {room}") as refused:
                loop.submit([1] * (100 - room), greedy(20, min_tokens=min_tokens))
            assert refused.value.param == "min_tokens"
        _, tokens, _ = await read(loop.submit([1] * 95, greedy(20, min_tokens=5)))
        assert len(tokens) == 5


async def test_no_choice_is_queued_where_a_later_one_is_refused() -> None:
    async with running(FakeGroup()) as loop:
        with pytest.raises(InvalidParameter) as refused:
            loop.submit_all([([1] * length, greedy(20, min_tokens=6)) for length in (10, 95)])
        assert refused.value.param == "min_tokens"
        assert (loop.num_live, loop.scheduler.num_waiting) == (0, 0)


async def test_a_full_queue_refuses_new_requests_and_serves_the_queued_ones() -> None:
    group = FakeGroup(token=lambda tokens: 5)
    async with running(group, slots=2, max_waiting=3) as loop:
        streams = [loop.submit([1, 3], greedy(4)) for _ in range(5)]
        with pytest.raises(QueueFull):
            loop.submit([1, 3], greedy(4))
        for stream in streams:
            assert len((await read(stream))[1]) == 4
        assert len((await read(loop.submit([1, 3], greedy(4))))[1]) == 4


async def test_a_dead_rank_ends_every_stream_once_with_one_clear_error() -> None:
    group = FakeGroup(step_s=0.002, token=lambda tokens: 5)
    async with running(group, slots=2) as loop:
        streams = [loop.submit([1, 3 + i], greedy(60)) for i in range(5)]
        before = await anext(streams[0])
        group.fail("rank 1 (pid 7) died")
        for stream in streams:
            with pytest.raises(RankFailure, match=r"rank 1 \(pid 7\) died"):
                await read(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert before.tokens and loop.scheduler.pool.num_used == 0 and not loop.scheduler.num_waiting
        with pytest.raises(RankFailure):
            loop.submit([1, 3], greedy())


async def test_tokens_from_before_a_failure_can_still_be_read() -> None:
    group = FakeGroup(step_s=0.001, token=lambda tokens: 5)
    async with running(group) as loop:
        stream = loop.submit([1, 3], greedy(90))
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
        streams = [loop.submit([1, 3], greedy(10)) for _ in range(3)]
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
        streams = [loop.submit([1, 3], greedy(10), stop=["never"]) for _ in range(8)]

        def broken(given: object) -> str:
            raise RuntimeError("injected")

        monkeypatch.setattr(getattr(streams[3], part), method, broken)
        results = await asyncio.gather(*(read(stream) for stream in streams), return_exceptions=True)
        assert isinstance(results[3], EngineError)
        assert all(result[1] == [5] * 10 for i, result in enumerate(results) if i != 3)  # type: ignore[index]
        assert loop.scheduler.pool.num_used == 0


async def test_draining_refuses_new_requests_and_lets_the_live_ones_end() -> None:
    group = FakeGroup(step_s=0.001, token=lambda tokens: 5)
    async with running(group) as loop:
        stream = loop.submit([1, 3], greedy(20))
        draining = asyncio.create_task(loop.drain(60.0))
        await asyncio.sleep(0.005)
        with pytest.raises(NotReady):
            loop.submit([1, 3], greedy())
        assert len((await read(stream))[1]) == 20
        assert await draining
        assert await loop.drain(0.01), "nothing is left"


async def test_retry_after_of_a_full_queue_is_the_time_until_half_of_it_is_served() -> None:
    scheduler = Scheduler(
        SchedulerConfig(2, 16, frozenset({EOS}), max_waiting=100, max_waiting_tokens=60), BlockPool(64, 16)
    )
    loop = EngineLoop(scheduler, TOKENIZER, max_seq_len=100)
    for _ in range(2):
        loop.submit([1, 3], greedy(20))
    assert scheduler.schedule() is not None and scheduler.num_running == 2
    for _ in range(14):  # all of them wait, for two slots
        loop.submit([1, 3, 4, 5], greedy(20))
    with pytest.raises(QueueFull, match="sequences of 56 tokens wait already, the limit is 60") as refused:
        loop.submit([1, 3, 4, 5, 6], greedy(20))
    assert refused.value.retry_after_s == SHORTEST_RETRY_S, "nothing has ended yet"
    now = time.monotonic()
    loop._retry._ends.extend([now - 20, now - 15, now - 10, now - 5])
    with pytest.raises(QueueFull) as refused:
        loop.submit([1, 3, 4, 5, 6], greedy(20))
    assert refused.value.retry_after_s == pytest.approx(14 / 2 / (4 / 20), rel=0.1)
    loop._retry._ends.clear()
    loop._retry._ends.extend([now - 3600 + 60 * n for n in range(50)] + [now - 1 + 0.25 * n for n in range(4)])
    with pytest.raises(QueueFull) as refused:
        loop.submit([1, 3, 4, 5, 6], greedy(20))
    assert refused.value.retry_after_s == pytest.approx(14 / 2 / (4 / 1), rel=0.1), (
        "the quiet hour before does not count"
    )
    loop.submit([1, 3, 4], greedy(20))


async def test_an_owner_with_many_requests_does_not_keep_another_waiting() -> None:
    async with running(FakeGroup(step_s=0.0005), slots=2) as loop:
        greedy_ones = [loop.submit([1, 3 + n], greedy(10), owner="a") for n in range(20)]
        modest = loop.submit([1, 99], greedy(10), owner="b")
        await read(modest)
        assert sum(stream.finish_reason is None for stream in greedy_ones) >= 14
        for stream in greedy_ones:
            await read(stream)


async def test_draining_gives_up_after_its_limit() -> None:
    group = FakeGroup()
    group.go.clear()
    async with running(group) as loop:
        loop.submit([1, 3], greedy(20))
        assert not await loop.drain(0.02)


async def test_a_stall_is_detected_and_an_idle_loop_is_not_stalled() -> None:
    group = FakeGroup()
    async with running(group) as loop:
        await asyncio.sleep(1.0)
        assert loop.stalled_s() == 0.0
        group.go.clear()
        stream = loop.submit([1, 3], greedy(20))
        assert loop.stalled_s() < 1.0, "idle time is no stall"
        await asyncio.sleep(0.03)
        assert loop.stalled_s() > 0.02
        group.go.set()
        await read(stream)
        assert loop.stalled_s() == 0.0


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
    streams = [loop.submit(prompt, greedy(30)) for prompt in prompts]
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
    streams = [loop.submit(prompt, greedy(30)) for prompt in prompts]
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
    loop.submit([1, 3, 4], greedy(20), owner="a")
    for epoch in (1, 2):
        assert scheduler.quarantine.canary is None and scheduler.schedule() is not None
        loop.restart(epoch, RankFailure("rank 1 died", rank=1))
    step = scheduler.schedule()
    assert step is not None and len(step.rows) == 1 and loop._is_canary(step), (
        "the quarantined request waits for the canary"
    )
    scheduler.commit(StepOutput(2, step.step, [5]))
    assert scheduler.admission.waiting._classes[0].counters.keys() == {"a"}
