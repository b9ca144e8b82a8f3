"""Where a front sends streams: new ones, those of an engine that ends, and those that wait."""

import asyncio
import random
from collections.abc import Callable, Sequence

import pytest

from deployments.engine.sequence_stream import SequenceStream
from deployments.links import messages
from llama_core.errors import QueueFull
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.fleet_rules import Waits
from tests.support.fleets import FakeEngineProcess, FleetOfEngines
from tests.support.recovering_service import read, steady
from tests.support.virtual_loop import AS_UVLOOP, network

LOOPS = AS_UVLOOP
STEP_S = 0.1
AT_ONCE_S = 1.0  # in which a stream gets a free slot


def group() -> FakeGroup:
    return FakeGroup(num_blocks=4000, step_s=STEP_S, token=steady)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def prompts(count: int, length: int = 20) -> list[list[int]]:
    """That share no block."""
    draw = random.Random(2)
    return [[1, *(draw.randrange(3, 500) for _ in range(length))] for _ in range(count)]


def running(engines: Sequence[FakeEngineProcess]) -> list[int]:
    return [engine.service.loop.scheduler.num_running for engine in engines]


def begun(streams: Sequence[SequenceStream], count: int = 3) -> Callable[[], bool]:
    return lambda: all(len(stream.sequence.output) >= count for stream in streams)


async def running_streams(fleet: FleetOfEngines, count: int) -> list[SequenceStream]:
    """Submitted at once; each has some tokens."""
    choices = await asyncio.gather(*(fleet.submit(prompt, greedy(120)) for prompt in prompts(count)))
    streams = [stream for (stream,) in choices]
    await until(begun(streams))
    return streams


@pytest.mark.parametrize("end", ["kill", "rank", "drain"])
@pytest.mark.parametrize("each", [6, 7])
async def test_streams_of_an_engine_that_ends_go_to_free_slots(end: str, each: int) -> None:
    """Of eight engines with eight slots: all fit into the others, with 7 on each exactly."""
    async with FleetOfEngines(group) as fleet:
        engines = [await fleet.start(max_batch_size=8, max_queue=1000) for _ in range(8)]
        streams = await running_streams(fleet, 8 * each)
        lost = max(engines, key=lambda engine: engine.service.loop.num_live)
        left = [engine for engine in engines if engine is not lost]
        with Waits(streams, left) as waits:
            if end == "kill":
                network().kill(lost.process)
            elif end == "rank":
                lost.groups.made[-1].fail()
            else:
                assert lost.server is not None
                await lost.server.hand_over(has_successor=False, timeout_s=5)
            await asyncio.sleep(3)
        assert waits.longest_s <= AT_ONCE_S
        assert sum(running(left)) + (end == "rank") * running([lost])[0] >= 8 * each
        assert not waits.waiting()


async def test_waiting_streams_move_to_an_engine_whose_ranks_are_back() -> None:
    """Two engines with full batches: the one whose rank dies has no streams when it serves again."""
    async with FleetOfEngines(group) as fleet:
        engines = [await fleet.start(max_batch_size=2, max_queue=1000) for _ in range(2)]
        streams = await running_streams(fleet, 4)
        with Waits(streams, engines) as waits:
            engines[0].groups.made[-1].fail()
            await asyncio.sleep(8)
        assert waits.longest_s <= AT_ONCE_S and running(engines) == [2, 2]
        assert [await read(stream) for stream in streams] == [continuation(p, 120, steady) for p in prompts(4)]


async def test_streams_of_an_update_without_room_spread_over_the_new_engines() -> None:
    """The first of them to start takes what it can; the others join one by one."""
    async with FleetOfEngines(group) as fleet:
        old = [await fleet.start(max_batch_size=4, max_queue=1000) for _ in range(4)]
        streams = await running_streams(fleet, 16)
        following: list[FakeEngineProcess] = []
        with Waits(streams, following) as waits:
            for engine in old:
                assert engine.server is not None
                await engine.server.hand_over(has_successor=True, timeout_s=5)
                network().kill(engine.process)
            for _ in range(4):
                following.append(await fleet.start(max_batch_size=4, max_queue=1000))
                await asyncio.sleep(1.5)
        assert running(following) == [4, 4, 4, 4] and waits.longest_s <= AT_ONCE_S


async def test_streams_that_had_begun_go_first_then_the_oldest() -> None:
    async with FleetOfEngines(group) as fleet:
        first = await fleet.start(max_batch_size=1, max_queue=100)
        (begun_one,) = await fleet.submit([1, 9, 3], greedy(20))
        streams = [begun_one]
        await until(begun(streams))
        for number in range(1, 6):
            streams += await fleet.submit([1, 9, 3 + number], greedy(20))
            await asyncio.sleep(0.01)
        network().kill(first.process)
        await asyncio.sleep(0.1)
        for number in range(6, 9):  # while no engine is there
            streams += await fleet.submit([1, 9, 3 + number], greedy(20))
            await asyncio.sleep(0.01)
        await fleet.start(max_batch_size=1, max_queue=100)
        served: list[int] = []

        async def follow(number: int) -> None:
            assert len(await read(streams[number])) == 20
            served.append(number)

        await asyncio.gather(*map(follow, range(9)))
        assert served == list(range(9))


@pytest.mark.parametrize("gap_s", [0.0, 0.001, 0.005])
async def test_a_burst_spreads_over_idle_engines(gap_s: float) -> None:
    """Its requests arrive within a step: no engine has told of any of them when the next one comes."""
    async with FleetOfEngines(group) as fleet:
        engines = [await fleet.start(max_batch_size=64, max_queue=1000) for _ in range(8)]
        for prompt in prompts(64):
            await fleet.submit(prompt, greedy(120))
            await asyncio.sleep(gap_s)
        await asyncio.sleep(1)
        assert max(running(engines)) - min(running(engines)) <= 2, running(engines)


async def test_unshared_prompts_one_after_the_other_spread_over_idle_engines() -> None:
    async with FleetOfEngines(group) as fleet:
        engines = [await fleet.start() for _ in range(4)]
        for prompt in prompts(60):
            (stream,) = await fleet.submit(prompt, greedy(2))
            await read(stream)
            await asyncio.sleep(1.0)  # each engine has told that it is idle
        taken = [engine.service.loop.num_requests for engine in engines]
        assert min(taken) >= 4 and sum(taken) == 60, taken


async def test_the_queues_limit_holds_for_the_held_requests_of_all_fronts_together() -> None:
    async with FleetOfEngines(group) as fleet, FleetOfEngines(group) as b, FleetOfEngines(group) as c:
        fronts, streams = (fleet, b, c), []
        for number in range(2):
            engine = await fleet.start(max_batch_size=1, max_queue=6)
            assert engine.invitation is not None
            for front in fronts[1:]:
                await front.meet(engine.invitation)
            if number == 0:
                await asyncio.sleep(2)  # in which the engine can tell what it knows of its fronts
                network().kill(engine.process)
                await asyncio.sleep(0.1)
                for front in fronts:
                    for token in range(12):
                        try:
                            streams += await front.submit([1, 9, token + 3], greedy(100))
                        except QueueFull:
                            break
        await asyncio.sleep(2)
        left = [stream for stream in streams if not stream.ended]
        assert engine.service.loop.scheduler.num_running == 1
        assert engine.service.loop.scheduler.num_waiting <= 6
        assert len(left) <= 1 + 6 + len(fronts), "each front's share of the queue, rounded up"


async def test_a_front_with_more_streams_than_an_engine_takes_keeps_its_connection() -> None:
    """Nine of ten small engines end. What does not fit waits for its turn."""
    async with FleetOfEngines(group, hold_timeout_s=600) as fleet:
        engines = [await fleet.start(max_batch_size=1, max_queue=1) for _ in range(10)]
        streams = []
        for number in range(20):
            streams += await fleet.submit([1, 9, number + 3], greedy(60))
        await asyncio.sleep(0.5)
        for engine in engines[:9]:
            network().kill(engine.process)
        assert engines[9].server is not None
        await asyncio.sleep(0.5)
        connections = set(engines[9].server.sessions)
        await asyncio.sleep(5)
        assert connections and set(engines[9].server.sessions) == connections
        assert sum(len(stream.sequence.output) for stream in streams) > 100
        expected = [continuation([1, 9, number + 3], 60, steady) for number in range(20)]
        assert await asyncio.gather(*map(read, streams)) == expected


async def test_an_engine_refuses_what_a_front_sends_beyond_that_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "max_streams", lambda max_batch_size, max_queue: 2)  # the front counts otherwise
    async with FleetOfEngines(group) as fleet:
        await fleet.start(max_batch_size=8)
        (link,) = fleet.links
        streams = await running_streams(fleet, 2)
        with pytest.raises(QueueFull, match="2 streams of one front"):
            await fleet.submit(prompts(1)[0], greedy(8))
        assert fleet.links == [link] and not link.is_lost
        await asyncio.gather(*map(read, streams))


async def test_a_stream_that_an_engine_has_preempted_goes_on_beside_a_free_slot() -> None:
    """The blocks of an engine hold two of its three streams to their ends. Another engine comes later."""

    def small() -> FakeGroup:
        return FakeGroup(num_blocks=20, step_s=STEP_S, token=steady)

    async with FleetOfEngines(small) as fleet:
        first = await fleet.start(max_batch_size=8)
        streams = await running_streams(fleet, 3)
        await until(lambda: first.service.loop.scheduler.num_preemptions > 0)
        waiting = [stream for stream in streams if len(stream.sequence.output) < 100]
        second = await fleet.start(max_batch_size=8)
        with Waits(streams, [second]) as waits:
            await until(lambda: second.service.loop.scheduler.num_running > 0)
            assert waits.longest_s <= AT_ONCE_S and waiting
        answers = [await read(stream) for stream in streams]
        assert answers == [continuation(stream.prompt_tokens, 120, steady) for stream in streams]


async def test_a_drained_engine_hands_its_streams_over_and_gets_no_more() -> None:
    async with FleetOfEngines(group) as fleet:
        first, second = [await fleet.start(max_batch_size=8) for _ in range(2)]
        streams = await running_streams(fleet, 6)
        assert not await first.engine.drain("another")
        assert running([first, second]) == [3, 3]
        assert await first.engine.drain(first.service.engine_id)
        await until(lambda: running([first, second]) == [0, 6])
        (more,) = await fleet.submit([1, 5, 7], greedy(5))
        assert await read(more) and not first.service.loop.num_live
        answers = [await read(stream) for stream in streams]
        assert answers == [continuation(stream.prompt_tokens, 120, steady) for stream in streams]
