"""Streams of a front over engines that end, stall, drain and start."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from deployments.engine.sequence_stream import SequenceStream
from deployments.fleet import placement
from deployments.links.engine_link import EngineLink
from deployments.links.front_session import FrontStream
from deployments.links.link import Link
from deployments.links.messages import Accepted, FromEngine, Load, Step
from deployments.openai.plan import engine_of
from llama_core.errors import InvalidParameter, NotReady, PoisonRequest, QueueFull, RankFailure
from llama_core.scheduling.request import Request, Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.fleets import FakeEngineProcess, FleetOfEngines
from tests.support.recovering_service import read, steady
from tests.support.virtual_loop import AS_UVLOOP

LOOPS = AS_UVLOOP
PROMPT = [1, *range(3, 40)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)


def slow() -> FakeGroup:
    return FakeGroup(num_blocks=400, step_s=0.003, token=steady)


def expected(prompt: list[int] = PROMPT, count: int = 60) -> list[int]:
    return continuation(prompt, count, steady)


def _has_live(engine: FakeEngineProcess) -> bool:
    return engine.service.loop.num_live > 0


def _is_in_batch(fleet: FleetOfEngines, engine: FakeEngineProcess, stream: SequenceStream) -> bool:
    """As far as the front knows."""
    (link,) = [link for link in fleet.links if link.engine_id == engine.service.engine_id]
    return any(live.is_admitted for live in link.streams.values() if live.stream is stream)


async def begun(stream: SequenceStream, count: int = 5) -> None:
    await until(lambda: stream.sequence.length - stream.sequence.prompt_len >= count)


@pytest.mark.parametrize("number", [1, 2])
async def test_streams_of_an_engine_that_ends_continue_on_another_one(number: int) -> None:
    async with FleetOfEngines(slow) as fleet:
        first = await fleet.start()
        streams = [*(await fleet.submit(PROMPT, GREEDY, n=2)), *(await fleet.submit([1, 9], GREEDY))]
        await begun(streams[0])
        if number == 2:
            await fleet.start()
        first.die()
        if number == 1:
            await asyncio.sleep(0.02)
            assert fleet.fleet.readiness().phase == "recovering"
            await fleet.start()
        assert [await read(stream) for stream in streams] == [expected(), expected(), expected([1, 9])]


async def test_logprobs_of_a_moved_stream_are_complete() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=0, prompt_logprobs=True)
    async with FleetOfEngines(slow) as fleet:
        first, _ = await fleet.start(), await fleet.start()
        (stream,) = await fleet.submit(PROMPT, params)
        await begun(stream)
        first.die()
        assert await read(stream) == expected()
        assert len(stream.sequence.logprobs) == 60
        assert len(stream.prompt_logprobs) == len(PROMPT) - 1


async def test_an_engine_that_drains_hands_its_streams_over_at_once() -> None:
    async with FleetOfEngines(slow) as fleet:
        first, second = await fleet.start(), await fleet.start()
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        await begun(stream)
        assert first.server is not None
        await asyncio.wait_for(first.server.hand_over(has_successor=False, timeout_s=30), 5)
        assert first.service.loop.num_live == 0 and second.service.loop.num_live == 1
        assert await read(stream) == expected()


async def test_a_stream_stays_with_an_engine_that_drains_where_no_other_can_continue_it() -> None:
    async with FleetOfEngines(slow) as fleet:
        first = await fleet.start()
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        await begun(stream)
        assert first.server is not None
        await first.server.hand_over(has_successor=False, timeout_s=30)
        assert await read(stream) == expected()


async def test_a_stream_is_held_where_a_successor_is_to_start() -> None:
    async with FleetOfEngines(slow) as fleet:
        first = await fleet.start()
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        await begun(stream)
        assert first.server is not None
        await first.server.hand_over(has_successor=True, timeout_s=30)
        assert first.service.loop.num_live == 0 and not stream.ended
        waiting = asyncio.create_task(fleet.submit([1, 9], GREEDY))
        await asyncio.sleep(0.02)
        first.die()
        await fleet.start()
        assert await read(stream) == expected()
        (other,) = await waiting
        assert await read(other) == expected([1, 9])


async def test_a_request_that_is_cancelled_as_it_moves_leaves_no_stream() -> None:
    async with FleetOfEngines(slow) as fleet:
        _ = await fleet.start(), await fleet.start()
        remote = fleet.fleet._models["demo"]
        task = asyncio.create_task(remote.submit(Request([PROMPT], [GREEDY])))

        def take(link: Link, original: Callable[[FromEngine], None], message: FromEngine) -> None:
            original(message)
            if isinstance(message, Accepted):
                remote._move(link, has_failed=False, keeps=True)
                task.cancel()

        for link in remote.links:
            link.take = partial(take, link, link.take)  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await task
        assert remote._events["moved"] == 1 and not any(link.streams for link in remote.links)


async def test_a_held_stream_ends_with_an_error_after_the_timeout() -> None:
    async with FleetOfEngines(slow, hold_timeout_s=0.1) as fleet:
        first = await fleet.start()
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        await begun(stream)
        first.die()
        with pytest.raises(NotReady, match="hold_timeout_s"):
            await read(stream)


async def test_a_stream_never_continues_on_an_engine_with_other_numerics() -> None:
    async with FleetOfEngines(slow, hold_timeout_s=0.3) as fleet:
        first = await fleet.start()
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        await begun(stream)
        await fleet.start(model_parallel_size=1)
        first.die()
        with pytest.raises(NotReady):
            await read(stream)
        (other,) = await fleet.submit(PROMPT, GREEDY)
        assert await read(other) == expected()


async def test_a_stream_during_which_engines_end_again_and_again_ends_alone() -> None:
    async with FleetOfEngines(lambda: FakeGroup(num_blocks=400, step_s=5.0, token=steady)) as fleet:
        engine = await fleet.start()
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        for _ in range(3):
            await until(partial(_is_in_batch, fleet, engine, stream))
            following = await fleet.start()
            engine.die()
            engine = following
        await until(partial(_is_in_batch, fleet, engine, stream))
        scheduler = following.service.loop.scheduler
        assert not scheduler.quarantine.admits(Sequence([1], GREEDY, max_length=9), list(scheduler.live())), (
            "it runs alone"
        )
        engine.die()
        with pytest.raises(PoisonRequest):
            await read(stream)


async def test_engines_that_end_while_a_stream_waits_in_their_queues_do_not_count_against_it() -> None:
    steps = iter([5.0, 5.0, 5.0, 5.0, 0.003])
    async with FleetOfEngines(lambda: FakeGroup(num_blocks=400, step_s=next(steps), token=steady)) as fleet:
        engine = await fleet.start(max_batch_size=1)
        (first,) = await fleet.submit(PROMPT, GREEDY)
        (waiting,) = await fleet.submit([1, 9], GREEDY)
        for _ in range(4):
            await until(partial(_is_in_batch, fleet, engine, first))
            following = await fleet.start(max_batch_size=1)
            engine.die()
            engine = following
        with pytest.raises(PoisonRequest):
            await read(first)
        assert await read(waiting) == expected([1, 9])


async def test_tokens_of_a_stalled_engine_that_comes_back_never_reach_a_stream_that_has_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine's frames are delayed, not lost: they arrive after the stream has gone on elsewhere."""
    async with FleetOfEngines(slow) as fleet:
        first, second = await fleet.start(), await fleet.start()
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        await begun(stream)
        (link,) = [link for link in fleet.links if link.streams]
        delayed: list[bytes] = []
        take = link.data_received
        monkeypatch.setattr(link, "data_received", delayed.append)
        link.heard_s -= 10.0
        await until(lambda: not link.streams)
        monkeypatch.undo()
        stalled = first if first.service.engine_id == link.invitation.engine else second
        await until(lambda: not stalled.service.loop.num_live)
        assert delayed
        for data in delayed:
            take(data)
        assert await read(stream) == expected()


async def test_a_request_that_a_stalled_engine_does_not_answer_goes_to_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement, "CLOSE_AFTER_S", 1e9)
    async with FleetOfEngines(slow) as fleet:
        engines = [await fleet.start(), await fleet.start()]
        stalled, other = fleet.links
        other.load = Load(running=8)  # so that the request goes to the first one
        delayed: list[bytes] = []
        take = stalled.data_received
        monkeypatch.setattr(stalled, "data_received", delayed.append)
        submitting = asyncio.create_task(fleet.submit(PROMPT, GREEDY))
        await until(lambda: delayed and stalled.streams)
        stalled.heard_s -= 10.0
        (stream,) = await asyncio.wait_for(submitting, 60)
        await until(lambda: not any(map(_has_live, engines[:1])))
        for data in delayed:
            take(data)
        assert await read(stream) == expected()


async def test_a_front_tries_again_to_meet_an_engine_whose_connection_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FleetOfEngines(slow) as fleet:
        engine = await fleet.start()
        (link,) = fleet.links
        refusals = iter([OSError(), OSError()])
        connect = EngineLink.connect

        async def refused_at_first(self: EngineLink, *args: Any) -> Any:
            if (error := next(refusals, None)) is not None:
                raise error
            return await connect(self, *args)

        monkeypatch.setattr(EngineLink, "connect", refused_at_first)
        link.close()
        await until(lambda: fleet.links not in ([], [link]))
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        assert await read(stream) == expected() and engine.service.loop.num_requests == 1


async def test_a_front_that_ends_does_not_connect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[object] = []
    async with FleetOfEngines(slow) as fleet:
        engine = await fleet.start()
        monkeypatch.setattr(fleet.fleet._models["demo"], "_on_lost", lost.append)
        assert engine.server is not None and engine.server.sessions
        await fleet.fleet.stop()
        await until(lambda: engine.server is not None and not engine.server.sessions)
        assert not lost


async def test_a_cancelled_stream_frees_the_engines_blocks() -> None:
    async with FleetOfEngines(slow) as fleet:
        engine = await fleet.start()
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        await begun(stream)
        stream.cancel()
        await until(lambda: engine.service.loop.scheduler.pool.num_used == 0)


async def test_a_stop_string_ends_the_engines_sequence() -> None:
    async with FleetOfEngines(slow) as fleet:
        engine = await fleet.start()
        text = engine_of(fleet.fleet, None).tokenizer.decode(expected()[:9])
        (stream,) = await fleet.submit(PROMPT, GREEDY, stop=(text[-3:],))
        assert len(await read(stream)) < 60
        await until(lambda: engine.service.loop.num_live == 0)
        assert stream.matched_stop == text[-3:]
        late = replace(GREEDY, min_tokens=60)
        assert [await read(one) for one in await fleet.submit(PROMPT, late, stop=(text[-3:],), n=2)] == [expected()] * 2


async def test_the_queues_limit_holds_for_all_fronts_together() -> None:
    async with FleetOfEngines(slow) as fleet, FleetOfEngines(slow) as other:
        engine = await fleet.start(max_batch_size=1, max_queue=1)
        assert engine.invitation is not None
        await other.fleet.meet(engine.invitation)
        streams = [*(await fleet.submit(PROMPT, GREEDY)), *(await other.submit(PROMPT, GREEDY))]
        with pytest.raises(QueueFull):
            await fleet.submit(PROMPT, GREEDY)
        assert [await read(stream) for stream in streams] == [expected(), expected()]


async def test_a_newcomer_on_one_front_gets_the_place_of_a_flood_s_last_request_on_another() -> None:
    async with FleetOfEngines(slow) as fleet, FleetOfEngines(slow) as other:
        engine = await fleet.start(max_batch_size=1, max_queue=2)
        assert engine.invitation is not None
        await other.fleet.meet(engine.invitation)
        flood = [stream for _ in range(3) for stream in await fleet.submit(PROMPT, GREEDY, owner="flood")]
        (newcomer,) = await other.submit(PROMPT, GREEDY, owner="new")
        with pytest.raises(QueueFull, match="given way") as refused:
            await read(flood[2])
        assert refused.value.retry_after_s >= 1.0
        assert [await read(stream) for stream in (newcomer, *flood[:2])] == [expected()] * 3


async def test_a_request_before_any_engine_is_refused_as_not_ready() -> None:
    async with FleetOfEngines(slow) as fleet:
        with pytest.raises(NotReady, match="no engine"):
            await fleet.submit(PROMPT, GREEDY)


async def test_two_steps_that_an_engine_reads_at_once_are_two_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FleetOfEngines(slow) as fleet:
        engine = await fleet.start()
        assert engine.server is not None
        (connection,) = engine.server.sessions
        sent: list[Step] = []
        monkeypatch.setattr(connection, "send", sent.append)
        stream = FrontStream(connection, 7, Sequence(PROMPT, GREEDY, max_length=99))
        stream.push([5])
        stream.push([6])
        await asyncio.sleep(0)
        assert [(step.numbers, step.tokens) for step in sent] == [([7], [[5]]), ([7], [[6]])]


async def test_a_refused_request_leaves_the_streams_of_the_next_one_alone() -> None:
    """Both are sent before the engine answers."""
    async with FleetOfEngines(slow) as fleet:
        await fleet.start(max_batch_size=1, max_queue=1)
        first = asyncio.create_task(fleet.submit(PROMPT, GREEDY, n=2))
        refused = asyncio.create_task(fleet.submit(PROMPT, GREEDY, n=2))
        third = asyncio.create_task(fleet.submit([1, 9], GREEDY))
        with pytest.raises(QueueFull):
            await refused
        assert [await read(stream) for stream in await first] == [expected(), expected()]
        with pytest.raises(QueueFull):
            await third
        (stream,) = await fleet.submit([1, 9], GREEDY)
        assert await read(stream) == expected([1, 9])
        await asyncio.wait_for(fleet.fleet.drain(), 5)


async def test_a_request_that_an_engine_cannot_read_is_refused_and_costs_no_connection() -> None:
    async with FleetOfEngines(slow) as fleet:
        engine = await fleet.start()
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        for bad in (SamplingParams(ignore_eos=1), GREEDY):  # type: ignore[arg-type]
            with pytest.raises(InvalidParameter, match="cannot be sent"):
                await fleet.submit(PROMPT, bad, owner="\ud800" if bad is GREEDY else "")
        assert await read(stream) == expected()
        assert engine.server is not None and len(engine.server.sessions) == 1


async def test_streams_of_an_engine_that_gives_up_are_held_and_not_ended() -> None:
    async with FleetOfEngines(slow) as fleet:
        first = await fleet.start()
        (stream,) = await fleet.submit(PROMPT, GREEDY)
        await begun(stream)
        first.service.loop.fail(RankFailure("the ranks could not be brought back"))
        await until(lambda: not first.server or not first.server.sessions)
        assert not stream.ended
        await fleet.start()
        assert await read(stream) == expected()


async def test_a_client_that_comes_back_waits_its_turn() -> None:
    async with FleetOfEngines(slow) as fleet:
        await fleet.start(max_batch_size=1)
        (back,) = await fleet.submit(PROMPT, GREEDY)
        await begun(back)
        back.suspend()
        (running,) = await fleet.submit([1, 9], GREEDY)
        await begun(running)
        (earlier,) = await fleet.submit([1, 8], GREEDY)
        await engine_of(fleet.fleet, None).readmit([back])
        assert await read(earlier) == expected([1, 8])
        assert back.sequence.length - back.sequence.prompt_len < 60, "it was not taken up before"
        assert await read(back) == expected()


async def test_streams_that_never_began_wait_their_turn_at_another_engine() -> None:
    """They keep their priority; those in the batch go first."""
    async with FleetOfEngines(slow) as fleet:
        first = await fleet.start(max_batch_size=1)
        (running,) = await fleet.submit(PROMPT, GREEDY, priority=9)
        await begun(running)
        late = await fleet.submit([1, 7], GREEDY, priority=9, n=3)
        (urgent,) = await fleet.submit([1, 8], GREEDY)
        first.die()
        await fleet.start(max_batch_size=1)
        assert await read(running) == expected()
        assert await read(urgent) == expected([1, 8])
        assert sum(stream.sequence.length > 10 for stream in late) <= 1
        assert [await read(stream) for stream in late] == [expected([1, 7])] * 3
