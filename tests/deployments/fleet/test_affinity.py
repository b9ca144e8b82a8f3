"""A front sends a prompt where its prefix was computed, unless that engine has more to do."""

from deployments.fleet.affinity import MAX_PREFIXES, KnownPrefixes, prefixes
from deployments.fleet.engine_link import EngineLink
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fleets import FakeEngineProcess, FleetOfEngines
from tests.support.recovering_service import read, steady

BLOCK = 16
PREFIX = [1, *range(3, 3 + 4 * BLOCK)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def quick(num_blocks: int = 4000) -> FakeGroup:
    return FakeGroup(num_blocks=num_blocks, step_s=0.001, token=steady)


def keys(scope: str = "", adapter: str = "", prompt: list[int] = PREFIX) -> list[bytes]:
    return prefixes(scope, adapter, prompt, BLOCK)


def _link(fleet: FleetOfEngines, engine: FakeEngineProcess) -> EngineLink:
    (link,) = [link for link in fleet.fleet._models["demo"].links if link.invitation.engine == engine.service.engine_id]
    return link


def test_a_prefix_is_known_as_far_as_it_is_equal_and_of_one_scope() -> None:
    known = KnownPrefixes()
    known.add(keys("a"))
    changed = [*PREFIX[: 2 * BLOCK + 5], 7, *PREFIX[2 * BLOCK + 6 :]]
    assert known.num_known(keys("a")) == 4
    assert known.num_known(keys("a", prompt=changed)) == 2
    assert known.num_known(keys("b")) == known.num_known(keys("a", "an adapter")) == 0
    assert known.num_known(keys("a", prompt=PREFIX[: BLOCK - 1])) == 0


def test_the_least_recently_used_prefixes_are_dropped_longest_first() -> None:
    known = KnownPrefixes()
    known.add(keys())
    known.add([number.to_bytes(16) for number in range(MAX_PREFIXES - 2)])
    assert known.num_known(keys()) == 2


async def test_a_front_knows_what_an_engine_has_computed_for_another_front() -> None:
    async with FleetOfEngines(quick) as fleet, FleetOfEngines(quick) as others:
        await fleet.start()
        engine = await fleet.start()
        assert engine.invitation is not None
        await others.fleet.meet(engine.invitation)
        (stream,) = await others.submit(PREFIX, SamplingParams(temperature=0.0, max_tokens=2 * BLOCK))
        prompt = [*PREFIX, *await read(stream)]
        link = _link(fleet, engine)
        await until(lambda: link.prefixes.num_known(keys(prompt=prompt)) == (len(prompt) - 1) // BLOCK)
        (stream,) = await fleet.submit(prompt, GREEDY)
        await read(stream)
        assert engine.service.loop.num_requests == 2


async def test_a_front_knows_what_an_engine_had_computed_before_they_met() -> None:
    async with FleetOfEngines(quick) as fleet, FleetOfEngines(quick) as late:
        engine = await fleet.start()
        (stream,) = await fleet.submit(PREFIX, GREEDY)
        await read(stream)
        assert engine.invitation is not None
        await late.fleet.meet(engine.invitation)
        await until(lambda: _link(late, engine).prefixes.num_known(keys()) == 4)


async def test_a_front_forgets_what_an_engine_has_evicted_or_lost_with_its_ranks() -> None:
    async with FleetOfEngines(lambda: quick(num_blocks=40)) as fleet:
        engine = await fleet.start()
        link = _link(fleet, engine)

        async def ask(prompt: list[int]) -> None:
            (stream,) = await fleet.submit(prompt, GREEDY)
            await read(stream)
            await until(lambda: link.prefixes.num_known(keys(prompt=prompt)) == len(prompt) // BLOCK)

        await ask(PREFIX)
        await ask([2] * 20 * BLOCK)
        await ask([3] * 20 * BLOCK)
        await until(lambda: link.prefixes.num_known(keys()) == 0)
        engine.groups.made[-1].fail()
        await until(lambda: link.prefixes.num_known(keys(prompt=[3] * 20 * BLOCK)) == 0)


async def test_prompts_with_one_prefix_go_to_one_engine_until_it_is_busy() -> None:
    async with FleetOfEngines(quick) as fleet:
        first, second = await fleet.start(), await fleet.start()
        for number in range(6):
            (stream,) = await fleet.submit([*PREFIX, 5 + number], GREEDY)
            await read(stream)
        busy, idle = sorted((first, second), key=lambda engine: -engine.service.loop.num_requests)
        assert (busy.service.loop.num_requests, idle.service.loop.num_requests) == (6, 0)
        assert busy.service.loop.scheduler.num_prefix_hits >= 5 * 4 * BLOCK
        endless = SamplingParams(temperature=0.0, max_tokens=400)
        streams = await fleet.submit(PREFIX[:5], endless, n=8)
        loaded = busy if busy.service.loop.num_live else idle
        link = _link(fleet, loaded)
        await until(lambda: link.running == 8)
        for _ in range(2):
            await fleet.submit([*PREFIX[:5], 8], GREEDY)
        assert loaded.service.loop.num_live == 8
        for stream in streams:
            stream.cancel()
