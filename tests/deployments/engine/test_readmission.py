"""Suspended streams hold no slot and no block, and go on from their tokens when they are admitted again."""

from collections.abc import AsyncIterator

import pytest

from deployments.engine.sequence_stream import SequenceStream
from llama_core.errors import DeadlineExceeded, NotReady
from llama_core.scheduling.request import FinishReason
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import until
from tests.support.fake_ranks import continuation
from tests.support.loop_engine import LoopEngine
from tests.support.requests import submit

PROMPT = [1, *range(3, 40)]


@pytest.fixture
async def engine() -> AsyncIterator[LoopEngine]:
    async with LoopEngine().running() as running:
        yield running


async def some(stream: SequenceStream, num_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += (await anext(stream)).tokens
    return tokens


async def rest(stream: SequenceStream) -> list[int]:
    return [token async for delta in stream for token in delta.tokens]


def submitted(engine: LoopEngine, max_tokens: int = 60) -> SequenceStream:
    stream: SequenceStream = submit(engine.loop, PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0))
    return stream


async def test_tokens_that_nobody_had_read_come_first(engine: LoopEngine) -> None:
    stream = submitted(engine)
    tokens = await some(stream, 5)
    await until(lambda: len(stream.sequence.tokens) >= len(PROMPT) + 20)
    stream.suspend()
    assert engine.num_live == 0 and engine.num_blocks_used == 0
    engine.readmit([stream])
    assert tokens + await rest(stream) == continuation(PROMPT, 60, ignore_eos=True)


async def test_a_stream_that_was_ended_with_an_error_goes_on_without_it(engine: LoopEngine) -> None:
    """The reader left before it had the error."""
    stream = submitted(engine)
    tokens = await some(stream, 5)
    stream.end(DeadlineExceeded("too late"))
    stream.suspend()
    engine.readmit([stream])
    assert tokens + await rest(stream) == continuation(PROMPT, 60, ignore_eos=True)


async def test_a_stream_that_has_ended_is_not_admitted_again(engine: LoopEngine) -> None:
    stream = submitted(engine, max_tokens=4)
    await until(lambda: stream.ended)
    stream.suspend()
    num_steps = engine.ranks.num_steps
    engine.readmit([stream])
    assert len(await rest(stream)) == 4 and stream.finish_reason is FinishReason.LENGTH
    assert engine.ranks.num_steps == num_steps and engine.num_live == 0


async def test_a_stream_is_suspended_twice_and_before_its_first_step(engine: LoopEngine) -> None:
    stream = submitted(engine)
    for _ in range(3):
        stream.suspend()
        engine.readmit([stream])
    assert await rest(stream) == continuation(PROMPT, 60, ignore_eos=True)


async def test_the_first_number_of_cached_tokens_stays(engine: LoopEngine) -> None:
    await rest(submitted(engine, max_tokens=2))
    stream = submitted(engine)
    await some(stream, 3)
    cached = stream.num_cached_tokens
    stream.suspend()
    engine.readmit([stream])
    await rest(stream)
    assert stream.num_cached_tokens == cached > 0


async def test_a_server_that_shuts_down_admits_nothing_again(engine: LoopEngine) -> None:
    stream = submitted(engine)
    await some(stream, 3)
    stream.suspend()
    await engine.loop.drain(0.1)
    with pytest.raises(NotReady):
        engine.readmit([stream])


async def test_the_request_that_resumes_has_times_of_its_own(engine: LoopEngine) -> None:
    stream = submitted(engine)
    await some(stream, 3)
    submitted_first = stream.timeline
    assert not stream.is_timed
    stream.suspend()
    engine.readmit([stream], is_timed=True)
    assert stream.is_timed and stream.timeline is not submitted_first
    await some(stream, 2)
    stream.suspend()
    first = stream.timeline
    assert first.admitted_s is not None and first.first_token_s is not None
    assert first.ended_s is not None
    engine.readmit([stream], is_timed=True)
    assert stream.timeline is not first
    engine.readmit([])
    await rest(stream)
