"""What engines tell of their load and costs, and what waits goes where it begins sooner."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from deployments.engine.sequence_stream import SequenceStream
from deployments.fleet.facts import costs_of
from deployments.fleet.placement import MAX_LOOKED_AT
from deployments.fleet.routing import NOMINAL
from deployments.links.affinity import EXPECTED_S, PromptPrefixes
from deployments.links.link import Link, RoutedStream
from deployments.links.messages import BEAT_S, LOAD_S
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import FinishReason, Terms
from llama_core.scheduling.request import Sequence as Sequence_
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import StepInput, StepOutput
from llama_core.scheduling.step_costs import CostModel, StepCosts, StepShape
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fleets import FleetOfEngines
from tests.support.recovering_service import read, steady
from tests.support.virtual_loop import AS_UVLOOP

LOOPS = AS_UVLOOP
BASE_S, TOKEN_S, ROW_S = 0.02, 0.001, 0.002


class CostlyGroup(FakeGroup):
    """A step takes as long as its rows and tokens say."""

    async def _compute(self, batch: StepInput) -> StepOutput:
        shape = StepShape.of(batch)
        self.step_s = BASE_S + TOKEN_S * shape.num_prompt_tokens + ROW_S * shape.num_decodes
        return replace(await super()._compute(batch), elapsed_ms=1e3 * self.step_s)


def group() -> FakeGroup:
    return CostlyGroup(num_blocks=4000, token=steady)


def prompt(number: int, length: int) -> list[int]:
    return [1, *((number * 7 + i) % 400 + 3 for i in range(length))]


async def submit(fleet: FleetOfEngines, number: int, length: int, max_tokens: int = 4) -> SequenceStream:
    (stream,) = await fleet.submit(prompt(number, length), SamplingParams(temperature=0.0, max_tokens=max_tokens))
    return stream


async def learned(fleet: FleetOfEngines, engines: int, max_tokens: int = 8, **args: Any) -> Sequence[Link]:
    """The links of so many engines, which have measured steps with prompts and of several decodes."""
    for _ in range(engines):
        await fleet.start(max_seq_len=4096, **args)
    for length in (300, 20, 30):
        streams = [await submit(fleet, 200 + i, length, max_tokens) for i in range(3 * engines)]
        await asyncio.gather(*map(read, streams))
    await asyncio.sleep(2 * BEAT_S)
    return fleet.links


async def test_an_engine_tells_its_costs_and_another_is_thought_to_be_like_it() -> None:
    async with FleetOfEngines(group) as fleet:
        (link,) = await learned(fleet, 1)
        assert link.costs.base_ms == pytest.approx(1e3 * BASE_S, rel=0.2)
        assert link.costs.token_ms == pytest.approx(1e3 * TOKEN_S, rel=0.2)
        assert link.costs.row_ms == pytest.approx(1e3 * ROW_S, rel=0.2)
        assert link.costs.output_tokens == pytest.approx(8, abs=1)
        await fleet.start()
        new = next(other for other in fleet.links if other is not link)
        assert costs_of(fleet.links)[new] == link.costs
        assert costs_of([new])[new] == NOMINAL


async def test_a_prompt_on_its_way_counts_until_the_engine_has_told_of_it() -> None:
    async with FleetOfEngines(group) as fleet:
        (link,) = await learned(fleet, 1, max_batch_size=2)
        assert (link.num_sequences, link.queued_tokens) == (0, 0)
        submitting = asyncio.create_task(submit(fleet, 1, 2000))
        await until(lambda: link.num_sequences)
        assert (link.num_sequences, link.queued_tokens) == (1, 2001)
        assert link.load.queued_tokens == 0
        stream = await submitting
        await until(lambda: link.load.queued_tokens)
        assert link.queued_tokens == link.load.queued_tokens <= 2001
        tokens = [link.queued_tokens]
        while not stream.sequence.output:
            await asyncio.sleep(LOAD_S)
            tokens.append(link.queued_tokens)
        assert tokens == sorted(tokens, reverse=True) and tokens[-1] <= 512
        await read(stream)
        await asyncio.sleep(BEAT_S)
        assert (link.num_sequences, link.queued_tokens) == (0, 0)


async def test_a_known_prefix_is_not_queued() -> None:
    async with FleetOfEngines(group) as fleet:
        (link,) = await learned(fleet, 1, max_batch_size=1)
        await read(await submit(fleet, 1, 1000))
        await asyncio.sleep(2 * BEAT_S)
        blocking = await submit(fleet, 2, 20, 200)
        await until(lambda: blocking.sequence.output)
        again = await submit(fleet, 1, 1000)
        await asyncio.sleep(BEAT_S)
        assert 0 < link.load.queued_tokens <= 2 * 16, link.load
        again.cancel()
        blocking.cancel()


@pytest.mark.parametrize("wrong", [2**62, -(10**9)])
async def test_a_front_that_tells_a_wrong_number_of_tokens_does_not_mislead_others(
    wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FleetOfEngines(group) as fleet, FleetOfEngines(group) as other:
        await learned(fleet, 1, max_batch_size=1)
        assert fleet.engines[0].invitation is not None
        await other.meet(fleet.engines[0].invitation)
        (link,) = other.links
        monkeypatch.setattr(RoutedStream, "num_new", lambda live, link: wrong)
        streams = [await submit(fleet, number, 1000) for number in range(4)]
        monkeypatch.undo()
        await asyncio.sleep(0.2)
        assert not link.is_lost and 0 <= link.load.queued_tokens <= 4004
        for stream in streams:
            stream.cancel()
        began_s = asyncio.get_running_loop().time()
        await until(lambda: not link.waiting)
        assert asyncio.get_running_loop().time() - began_s <= LOAD_S + 0.005, "cancels are told too"


async def test_a_front_without_streams_hears_of_a_changed_load_within_50_ms() -> None:
    async with FleetOfEngines(group) as fleet, FleetOfEngines(group) as other:
        await learned(fleet, 1, max_batch_size=2)
        assert fleet.engines[0].invitation is not None
        await other.meet(fleet.engines[0].invitation)
        (link,) = other.links
        await asyncio.sleep(0.8 * BEAT_S)
        for number in range(3):
            heard_s, loop = link.heard_s, asyncio.get_running_loop()
            stream = await submit(fleet, number, 3000)
            began_s = loop.time()
            await until(lambda: link.load.queued_tokens)
            assert loop.time() - began_s <= LOAD_S + 0.005 and link.heard_s > heard_s
            stream.cancel()
            await until(lambda: not link.load.queued_tokens)


async def test_short_requests_do_not_wait_behind_long_prompts_of_another_engine() -> None:
    async with FleetOfEngines(group) as fleet:
        links = await learned(fleet, 2)
        long = [await submit(fleet, number, 3500) for number in range(3)]
        assert sorted(len(link.streams) for link in links) == [1, 2]
        short = [await submit(fleet, number, 20) for number in range(50, 58)]
        assert sorted(len(link.streams) for link in links) == [2, 9]
        for stream in (*long, *short):
            stream.cancel()


async def test_what_waits_goes_to_an_engine_that_joins_oldest_first() -> None:
    async with FleetOfEngines(group) as fleet:
        await learned(fleet, 1, 100, max_batch_size=4, max_queue=1000)
        streams = [await submit(fleet, number, 20, 100) for number in range(16)]
        await until(lambda: streams[3].sequence.output)
        waiting = streams[4:]
        assert not any(stream.sequence.output for stream in waiting)
        second = await fleet.start(max_seq_len=4096, max_batch_size=4, max_queue=1000)
        await until(lambda: second.service.loop.scheduler.num_running == 4, 2.0)
        began = [stream for stream in waiting if stream.sequence.output or stream.timeline.admitted_s is not None]
        await until(lambda: all(stream.sequence.output for stream in waiting[:4]), 2.0)
        assert began == waiting[: len(began)]
        for stream in streams:
            stream.cancel()


async def test_a_stream_waits_where_its_prompt_is_known_if_that_is_sooner() -> None:
    """Its engine reads another prompt, for 1 s; elsewhere a slot is free, and its own prompt would take 3 s."""
    async with FleetOfEngines(group) as fleet:
        links = await learned(fleet, 2)
        await read(await submit(fleet, 1, 3000))
        await asyncio.sleep(2 * BEAT_S)
        keys = PromptPrefixes(Terms(), prompt(1, 3000)).keys(16)
        known = links[0].prefixes.num_known(keys)
        (knows,) = [link for link in links if link in known]
        before = await submit(fleet, 1, 4000)  # goes on after the known one
        began_s = asyncio.get_running_loop().time()
        stream = await submit(fleet, 1, 3000)
        await until(lambda: stream.sequence.output)
        assert asyncio.get_running_loop().time() - began_s < 1.6
        (engine,) = [each for each in fleet.engines if each.service.engine_id == knows.engine_id]
        assert stream.sequence.num_cached and engine.service.loop.scheduler.num_prefix_hits >= 2900
        await read(before)


async def test_a_front_hears_of_what_waits_at_an_engine_during_a_long_step() -> None:
    async with FleetOfEngines(group) as fleet, FleetOfEngines(group) as other:
        await learned(fleet, 1, max_batch_size=1, max_queue=1000)
        assert fleet.engines[0].invitation is not None
        await other.meet(fleet.engines[0].invitation)
        (link,) = other.links
        running = await submit(fleet, 1, 2000)  # in steps of half a second
        await asyncio.sleep(BEAT_S + 0.1)
        waiting = [await submit(fleet, number, 1600) for number in (2, 3)]
        began_s, num_waiting = asyncio.get_running_loop().time(), link.waiting
        await until(lambda: link.waiting == num_waiting + 2)
        assert asyncio.get_running_loop().time() - began_s <= LOAD_S + 0.005
        for stream in (running, *waiting):
            stream.cancel()


async def test_prompts_that_share_a_template_spread_over_engines_that_know_it() -> None:
    template = [1, *range(500, 500 + 63)]
    async with FleetOfEngines(group) as fleet:
        links = await learned(fleet, 4)
        keys = PromptPrefixes(Terms(), template).keys(16)
        for link in links:
            link.prefixes.learn(link, [key.to_bytes(8, "little") for key in keys], [], is_whole=False)
        chosen = set()
        for number in range(12):
            params = SamplingParams(temperature=0.0, max_tokens=1)
            (stream,) = await fleet.submit([*template, *prompt(number, 40)], params)
            chosen |= {link for link in links if link.streams}
            await read(stream)
            await asyncio.sleep(2 * BEAT_S)
        assert len(chosen) >= 3


async def test_a_stream_that_waits_for_longer_than_it_would_take_elsewhere_goes_there() -> None:
    """A slot is to come free within 0.2 s by the mean of former outputs, and does not for 20 s."""
    async with FleetOfEngines(group) as fleet:
        await learned(fleet, 2, max_batch_size=1)
        await read(await submit(fleet, 1, 3000))
        await asyncio.sleep(2 * BEAT_S)
        blocking = await submit(fleet, 1, 3100, 900)
        await until(lambda: blocking.sequence.output)
        began_s = asyncio.get_running_loop().time()
        stream = await submit(fleet, 1, 3000)
        await until(lambda: stream.sequence.output)
        waited_s = asyncio.get_running_loop().time() - began_s
        assert stream.sequence.num_cached == 0 and 6.0 < waited_s < 7.5, "3 s of waiting, then 3 s of its prompt"
        blocking.cancel()


def test_queued_tokens_are_those_that_wait_and_those_that_steps_have_not_computed() -> None:
    config = SchedulerConfig(1, 600, frozenset({2}))
    scheduler = Scheduler(config, BlockPool(1000, 16))
    scheduler.prompt_budget.limit(600)
    running, waiting = (Sequence_(prompt(number, 999), SamplingParams(), 1100) for number in range(2))
    scheduler.add(running)
    scheduler.add(waiting)
    assert scheduler.num_queued_tokens == 2000
    batch = scheduler.schedule()
    assert batch is not None and batch.num_tokens < 1000 and scheduler.num_queued_tokens == 2000, (
        "the step is in flight"
    )
    scheduler.commit(StepOutput(batch.epoch, batch.step, []))
    assert scheduler.num_queued_tokens == 2000 - batch.num_tokens
    equal = Sequence_(waiting.prompt, SamplingParams(), 1100)
    scheduler.add(equal)  # by another front, which does not know of the first one
    assert scheduler.num_queued_tokens == 2001 - batch.num_tokens
    scheduler.finish(waiting, FinishReason.ABORT)
    assert scheduler.num_queued_tokens == 2000 - batch.num_tokens
    scheduler.finish(equal, FinishReason.ABORT)
    assert scheduler.num_queued_tokens == 1000 - batch.num_tokens


async def test_a_prompt_that_waits_for_long_is_still_expected_where_it_waits() -> None:
    async with FleetOfEngines(group) as fleet:
        await learned(fleet, 2, max_batch_size=1, max_queue=100)
        streams = [await submit(fleet, number, 20, 900) for number in range(2)]
        waiting = await submit(fleet, 7, 500)
        await asyncio.sleep(3 * EXPECTED_S)
        assert not waiting.sequence.output
        (link,) = [link for link in fleet.links for live in link.streams.values() if live.stream is waiting]
        assert link.prefixes.num_known(PromptPrefixes(Terms(), prompt(7, 500)).keys(16))[link] == 501 // 16
        for stream in (*streams, waiting):
            stream.cancel()


def test_the_load_of_an_adapter_is_no_cost_of_a_token() -> None:
    costs = StepCosts()
    costs.observe(StepShape(1, 0, 0), 20.0)
    costs.observe(StepShape(1, 100, 0), 120.0)
    costs.observe_load(StepShape(1, 100, 0), 420.0)
    assert costs.model(0.0) == CostModel(20.0, 0.0, 1.0, 300.0, 0.0)


async def test_streams_that_cannot_move_do_not_hold_up_those_behind_them() -> None:
    async with FleetOfEngines(group) as fleet:
        await learned(fleet, 1, 60, max_batch_size=2, max_queue=200)
        bound = [await submit(fleet, number, 300, 60) for number in range(2 * MAX_LOOKED_AT)]
        others = [await submit(fleet, 200 + number, 300, 60) for number in range(10)]
        model, first = fleet.fleet._models["demo"], fleet.links[0]
        able, sequences = model._able, {stream.sequence for stream in bound}

        def but_bound(live: RoutedStream, *args: Any, **options: Any) -> list[Link]:  # as of an adapter of one engine
            found = able(live, *args, **options)
            return [link for link in found if link is first or live.stream.sequence not in sequences]

        with mock.patch.object(model, "_able", but_bound):
            await fleet.start(max_seq_len=4096, max_batch_size=2, max_queue=200)
            second = next(link for link in fleet.links if link is not first)
            await until(lambda: len(second.streams) >= 4, 3.0)
        for stream in (*bound, *others):
            stream.cancel()


async def test_what_moves_to_an_engine_that_joins_is_no_more_than_its_share() -> None:
    async with FleetOfEngines(group) as fleet:
        await learned(fleet, 1, 60, max_batch_size=4, max_queue=400)
        streams = [await submit(fleet, number, 300, 60) for number in range(64)]
        await fleet.start(max_seq_len=4096, max_batch_size=4, max_queue=400)
        most, second = 0, next(link for link in fleet.links if not link.streams)
        for _ in range(40):
            await asyncio.sleep(LOAD_S)
            most = max(most, len(second.streams))
        assert 24 <= most <= 40, most
        for stream in streams:
            stream.cancel()


def test_a_further_choice_of_a_prompt_costs_one_token() -> None:
    stream, link = mock.Mock(), mock.Mock()
    stream.sequence.length, link.state.block_size = 100, 16
    prefixes = PromptPrefixes(Terms(), [1] * 100)
    assert RoutedStream(stream, prefixes).num_new(link) == 100
    assert RoutedStream(stream, prefixes, is_copy=True).num_new(link) == 1
