"""A front sends a prompt where its prefix was computed, unless that engine has more to do."""

from deployments.fleet.affinity import CHUNK, MAX_PREFIXES, KnownPrefixes, prefixes
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fleets import FleetOfEngines
from tests.support.recovering_service import read, steady

PREFIX = [1, *range(3, 3 + 4 * CHUNK)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def quick() -> FakeGroup:
    return FakeGroup(num_blocks=4000, step_s=0.001, token=steady)


def test_a_prefix_is_known_as_far_as_it_is_equal_and_of_one_scope() -> None:
    known = KnownPrefixes()
    known.add(prefixes("a", PREFIX))
    changed = [*PREFIX[: 2 * CHUNK + 5], 7, *PREFIX[2 * CHUNK + 6 :]]
    assert known.num_known(prefixes("a", PREFIX)) == 4 * CHUNK
    assert known.num_known(prefixes("a", changed)) == 2 * CHUNK
    assert known.num_known(prefixes("b", PREFIX)) == known.num_known(prefixes("a", PREFIX[: CHUNK - 1])) == 0


def test_the_least_recently_used_prefixes_are_dropped_longest_first() -> None:
    known = KnownPrefixes()
    known.add(prefixes("", PREFIX))
    known.add([number.to_bytes(16) for number in range(MAX_PREFIXES - 2)])
    assert known.num_known(prefixes("", PREFIX)) == 2 * CHUNK


async def test_prompts_with_one_prefix_go_to_one_engine_until_it_is_busy() -> None:
    async with FleetOfEngines(quick) as fleet:
        first, second = await fleet.start(), await fleet.start()
        for number in range(6):
            (stream,) = await fleet.submit([*PREFIX, 5 + number], GREEDY)
            await read(stream)
        busy, idle = sorted((first, second), key=lambda engine: -engine.service.loop.num_requests)
        assert (busy.service.loop.num_requests, idle.service.loop.num_requests) == (6, 0)
        assert busy.service.loop.scheduler.num_prefix_hits >= 5 * 4 * CHUNK
        endless = SamplingParams(temperature=0.0, max_tokens=400)
        streams = await fleet.submit(PREFIX[:5], endless, n=8)
        loaded = busy if busy.service.loop.num_live else idle
        (link,) = [link for link in fleet.fleet._models["demo"].links if link.streams]
        await until(lambda: link.running == 8)
        for _ in range(2):
            await fleet.submit([*PREFIX[:5], 8], GREEDY)
        assert loaded.service.loop.num_live == 8
        for stream in streams:
            stream.cancel()
