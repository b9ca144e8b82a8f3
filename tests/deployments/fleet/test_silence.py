"""Connections that carry nothing, and processes that stand still: nobody is told, and no connection ends."""

import asyncio
import random
import time
from collections.abc import Sequence

import pytest

from deployments.engine.engine_loop import EngineLoop
from deployments.engine.sequence_stream import SequenceStream
from deployments.fleet.fleet import Fleet
from deployments.links.engine_link import EngineLink
from deployments.links.messages import BEAT_S, CLOSE_AFTER_S
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.model_text import ModelText
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.fleets import FleetOfEngines
from tests.support.recovering_service import read, steady
from tests.support.virtual_loop import AS_UVLOOP, network
from tests.support.virtual_network import DELAY_S, End

LOOPS = AS_UVLOOP
STEP_S = 0.25
NOTICED_S = 2.0  # within which a silence is acted upon
MAX_TOKENS = 80


def group() -> FakeGroup:
    return FakeGroup(num_blocks=8000, step_s=STEP_S, token=steady)


def greedy(max_tokens: int = MAX_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def prompt(number: int) -> list[int]:
    return [1, *(3 + (number * 7 + i) % 400 for i in range(20))]


async def fleet_with_streams(
    fleet: FleetOfEngines, num_engines: int, num_streams: int, max_tokens: int = MAX_TOKENS
) -> list[SequenceStream]:
    for _ in range(num_engines):
        await fleet.start(max_batch_size=64, max_queue=1000, max_seq_len=1024)
    return await running_streams(fleet, range(num_streams), max_tokens)


async def running_streams(
    fleet: FleetOfEngines, numbers: Sequence[int], max_tokens: int = MAX_TOKENS
) -> list[SequenceStream]:
    params = greedy(max_tokens)
    choices = await asyncio.gather(*(fleet.submit(prompt(number), params, owner="key") for number in numbers))
    streams = [stream for (stream,) in choices]
    await until(lambda: all(stream.sequence.output for stream in streams))
    return streams


async def all_right(streams: Sequence[SequenceStream]) -> bool:
    expected = [continuation(stream.sequence.prompt, MAX_TOKENS, steady) for stream in streams]
    return await asyncio.gather(*map(read, streams)) == expected


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When an engine was asked to continue a stream."""
    times: list[float] = []
    continue_ = EngineLoop.continue_

    def noted(self: EngineLoop, *args: object, **options: object) -> None:
        times.append(time.monotonic())
        continue_(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(EngineLoop, "continue_", noted)
    return times


@pytest.mark.parametrize("num_engines", [1, 4, 8])
async def test_no_stream_moves_when_a_front_hears_none_of_its_engines(num_engines: int, moves: list[float]) -> None:
    async with FleetOfEngines(group) as fleet:
        streams = await fleet_with_streams(fleet, num_engines, 5 * num_engines)
        for silent_s in (1.6, 2.1, 4.0):
            for engine in fleet.engines:
                network().silence(engine.process, fleet.process, both=False)
            await asyncio.sleep(silent_s)
            network().heal()
            await asyncio.sleep(1.0)
        assert not moves
        assert await all_right(streams)


async def test_no_stream_moves_however_the_last_and_the_first_beats_that_a_front_hears_are_spread(
    moves: list[float],
) -> None:
    """Of the silent engines some were heard later than others, and are heard again sooner."""
    draw = random.Random(7)
    async with FleetOfEngines(group) as fleet:
        streams = await fleet_with_streams(fleet, 5, 10, max_tokens=1000)
        for _ in range(8):
            await asyncio.sleep(draw.uniform(2.0, 3.0))
            for engine in draw.sample(fleet.engines, 5):
                network().silence(engine.process, fleet.process, both=False)
                await asyncio.sleep(draw.uniform(0.0, 0.12))
            await asyncio.sleep(draw.uniform(1.2, 4.0))
            for engine in draw.sample(fleet.engines, 5):
                network().heal(engine.process, fleet.process)
                await asyncio.sleep(draw.uniform(0.0, 0.12))
        assert not moves
        assert fleet.fleet._events["suspected"] > 10
        for stream in streams:
            stream.cancel()


async def test_no_stream_moves_when_a_front_itself_stands_still(moves: list[float]) -> None:
    async with FleetOfEngines(group) as fleet:
        streams = await fleet_with_streams(fleet, 4, 20)
        for still_s in (0.9, 1.4, 1.6, 1.8, 2.0, 2.2, 4.0):
            network().stop(fleet.process)
            await asyncio.sleep(still_s)
            network().go_on(fleet.process)
            await asyncio.sleep(0.77)
        assert not moves and fleet.fleet._events["suspected"] == 0
        assert await all_right(streams)


@pytest.mark.parametrize("after_s", [n * DELAY_S / 2 for n in range(-4, 5)])
async def test_an_engine_whose_beat_meets_the_end_of_a_fronts_pause_is_not_deaf(after_s: float) -> None:
    """That beat tells how long the front has said nothing, and the next one comes with the front's next tick."""
    async with FleetOfEngines(group) as fleet:
        await fleet.start()
        (link,) = fleet.links
        before_s = link.heard_s
        await until(lambda: link.heard_s != before_s)
        ends_s = link.heard_s - DELAY_S + 6 * BEAT_S + after_s
        network().stop(fleet.process)
        await asyncio.sleep(ends_s - time.monotonic())
        network().go_on(fleet.process)
        await asyncio.sleep(3.0)
        assert fleet.fleet._events["suspected"] == 0


async def test_streams_of_engines_that_fall_silent_together_move_once(moves: list[float]) -> None:
    """Never to another one that is silent too."""
    async with FleetOfEngines(group) as fleet:
        streams = await fleet_with_streams(fleet, 6, 30)
        silent = fleet.engines[:4]
        lost = sum(engine.service.loop.num_live for engine in silent)
        cut_s = time.monotonic()
        for engine in silent:
            network().silence(engine.process, fleet.process)
        await asyncio.sleep(5)
        assert len(moves) == lost > 10
        assert max(moves) - cut_s <= NOTICED_S
        network().heal()
        assert await all_right(streams)
        assert len(moves) == lost


@pytest.mark.parametrize("direction", ["from the engine", "to the engine", "both"])
async def test_a_request_is_served_beside_an_engine_that_cannot_be_reached(direction: str) -> None:
    async with FleetOfEngines(group) as fleet:
        await fleet_with_streams(fleet, 2, 0)
        first, second = fleet.engines
        if direction != "from the engine":
            network().silence(fleet.process, first.process, both=False)
        if direction != "to the engine":
            network().silence(first.process, fleet.process, both=False)
        began_s = time.monotonic()
        streams = await running_streams(fleet, range(8))
        assert time.monotonic() - began_s <= NOTICED_S + 3 * STEP_S
        assert second.service.loop.num_live == 8
        assert await all_right(streams)


async def test_an_engine_frees_the_slots_of_a_front_that_has_lost_power() -> None:
    async with FleetOfEngines(group) as a, FleetOfEngines(group) as b:
        engine = await a.start(max_batch_size=4, max_queue=100)
        assert engine.invitation is not None and engine.server is not None
        await b.meet(engine.invitation)
        await running_streams(a, range(4))
        await asyncio.sleep(1.0)
        network().lose_power(a.process)
        cut_s = time.monotonic()
        again = await running_streams(b, range(4))  # the clients have come back with their keys
        waited_s = time.monotonic() - cut_s
        assert CLOSE_AFTER_S - 1.0 <= waited_s <= CLOSE_AFTER_S + 1.5
        await until(lambda: engine.server is not None and len(engine.server.sessions) == 1, 5)
        assert await all_right(again)


@pytest.mark.parametrize("silent_s", [0.4 * CLOSE_AFTER_S, 0.9 * CLOSE_AFTER_S, 1.5 * CLOSE_AFTER_S])
@pytest.mark.parametrize("both", [False, True], ids=["to the engine", "both directions"])
async def test_streams_go_on_when_their_front_is_back(silent_s: float, both: bool, moves: list[float]) -> None:
    """An engine gives them up after CLOSE_AFTER_S, no sooner. No other engine can take them meanwhile."""
    async with FleetOfEngines(group) as fleet:
        streams = await fleet_with_streams(fleet, 1, 4)
        (engine,) = fleet.engines
        before = list(engine.service.loop.scheduler.live())
        network().silence(fleet.process, engine.process, both=both)
        await asyncio.sleep(silent_s)
        if silent_s < CLOSE_AFTER_S:
            assert list(engine.service.loop.scheduler.live()) == before
        network().heal()
        await asyncio.sleep(1.0)
        assert bool(moves) == (silent_s > CLOSE_AFTER_S)
        assert await all_right(streams)


@pytest.mark.parametrize("others", [0, 1])
async def test_a_link_that_takes_no_more_bytes_counts_as_silent(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reads too slowly. Without another engine its streams stay, and requests wait for one."""
    async with FleetOfEngines(group) as fleet:
        streams = await fleet_with_streams(fleet, 1, 2)
        (engine,) = fleet.engines
        for _ in range(others):
            await fleet.start(max_batch_size=64, max_seq_len=1024)
        (end,) = (end for end in network().ends if end.process is fleet.process and end.peer.process is engine.process)
        monkeypatch.setattr(End, "get_write_buffer_size", lambda each: 65 * 2**20 if each is end else 0)
        request = asyncio.ensure_future(fleet.submit(prompt(2), greedy()))
        await asyncio.sleep(NOTICED_S)
        if not others:
            assert fleet.fleet.readiness().phase == "recovering"
            assert not any(stream.sequence.output for stream in request.result())
            await fleet.start(max_batch_size=64, max_seq_len=1024)
            await asyncio.sleep(0.1)
        streams += request.result()
        await asyncio.sleep(3 * STEP_S)
        assert fleet.engines[1].service.loop.num_live == 3
        assert await all_right(streams)


async def test_an_engine_whose_text_takes_long_to_read_is_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    greeted = Fleet._greeted

    async def greeted_slowly(fleet: Fleet, link: EngineLink) -> ModelText:
        text = await greeted(fleet, link)
        await asyncio.sleep(4)
        return text

    monkeypatch.setattr(Fleet, "_greeted", greeted_slowly)
    async with FleetOfEngines() as fleet:
        await fleet.start()
        assert fleet.fleet.readiness().ready
        await asyncio.sleep(2)
        assert fleet.fleet.readiness().ready and fleet.fleet._events["suspected"] == 0
