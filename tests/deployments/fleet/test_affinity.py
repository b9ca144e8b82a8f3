"""A front sends a prompt where its prefix was computed, unless that engine has more to do."""

import asyncio
import itertools
import random
from collections.abc import Hashable

import pytest

from deployments.args import IngressArgs
from deployments.engine.callers import Callers
from deployments.links import affinity
from deployments.links.affinity import PrefixIndex, PromptPrefixes, shortened
from deployments.links.engine_link import EngineLink
from deployments.openai.plan import engine_of
from llama_core.scheduling.prefix_cache import prefix_hash, root_hash
from llama_core.scheduling.request import Terms
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fleets import FakeEngineProcess, FleetOfEngines
from tests.support.recovering_service import read, steady

BLOCK = 16
PREFIX = [1, *range(3, 3 + 4 * BLOCK)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def quick(num_blocks: int = 4000) -> FakeGroup:
    return FakeGroup(num_blocks=num_blocks, step_s=0.001, token=steady)


def hashes(scope: str = "", adapter: str = "", prompt: list[int] = PREFIX) -> list[bytes]:
    """As an engine sends them."""
    found, prefix = [], root_hash(scope, adapter)
    for begin in range(0, len(prompt) - BLOCK + 1, BLOCK):
        prefix = prefix_hash(prefix, prompt[begin : begin + BLOCK])
        found.append(shortened(prefix))
    return found


def num_known(
    index: PrefixIndex, engine: Hashable, scope: str = "", adapter: str = "", prompt: list[int] = PREFIX
) -> int:
    return index.num_known(PromptPrefixes(Terms(cache_scope=scope, adapter=adapter), prompt).keys(BLOCK)).get(engine, 0)


def _link(fleet: FleetOfEngines, engine: FakeEngineProcess) -> EngineLink:
    (link,) = [link for link in fleet.links if link.engine_id == engine.service.engine_id]
    return link


async def _ask(fleet: FleetOfEngines, prompt: list[int], params: SamplingParams = GREEDY, owner: str = "") -> list[int]:
    (stream,) = await fleet.submit(prompt, params, owner=owner)
    return await read(stream)


def test_a_prefix_is_known_as_far_as_it_is_equal_and_of_one_scope() -> None:
    index = PrefixIndex()
    index.learn("engine", hashes("a"), [], is_whole=True)
    changed = [*PREFIX[: 2 * BLOCK + 5], 7, *PREFIX[2 * BLOCK + 6 :]]
    assert num_known(index, "engine", "a") == 4
    assert num_known(index, "engine", "a", prompt=changed) == 2
    assert num_known(index, "engine", "b") == num_known(index, "engine", "a", "an adapter") == 0
    assert num_known(index, "engine", "a", prompt=PREFIX[: BLOCK - 1]) == 0


def test_a_prompt_whose_first_blocks_are_outside_of_a_sliding_window_is_known() -> None:
    index = PrefixIndex()
    index.learn("engine", hashes(), [], is_whole=True)
    index.learn("engine", [], hashes()[:2], is_whole=False)
    keys = PromptPrefixes(Terms(), PREFIX).keys(BLOCK)
    assert index.num_known(keys, has_window=True) == {"engine": 4}
    assert not index.num_known(keys)  # other engines compute the blocks after a lost one again


def test_a_prompt_that_an_engine_never_computes_is_expected_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "EXPECTED_S", 0.0)
    index = PrefixIndex()
    index.learn("engine", [], [], is_whole=True)
    index.expect("engine", PromptPrefixes(Terms(), PREFIX).keys(BLOCK))
    index.learn("engine", [], [], is_whole=False)
    assert num_known(index, "engine") == 4
    index.learn("engine", [], [], is_whole=False)
    assert num_known(index, "engine") == 0


def test_an_expected_prompt_whose_blocks_are_evicted_is_expected_no_more() -> None:
    index = PrefixIndex()
    index.learn("engine", hashes(), [], is_whole=True)
    index.expect("engine", PromptPrefixes(Terms(), PREFIX).keys(BLOCK))
    index.learn("engine", [], hashes()[2:], is_whole=False)
    assert num_known(index, "engine") == 2


def test_an_index_of_many_engines_knows_what_a_set_for_each_would_know() -> None:
    """Engines come, lose some or all of their blocks, and go, while others take their places."""
    chance, index = random.Random(1), PrefixIndex()
    names = itertools.count()
    prompts = [[number, *range(3, 3 + BLOCK * chance.randrange(1, 9))] for number in range(40)]
    pool = sorted({each for prompt in prompts for each in hashes(prompt=prompt)})
    model: dict[int, set[bytes]] = {}
    for _ in range(600):
        match chance.randrange(6):
            case 0 if len(model) < 12:
                model[next(names)] = set()
                index.learn(max(model), [], [], is_whole=True)
            case 1 if len(model) > 3 and chance.random() < 0.5:
                engine = chance.choice(list(model))
                del model[engine]
                index.forget(engine)
            case kind if model:
                engine, is_whole = chance.choice(list(model)), kind == 2
                cached = chance.sample(pool, 20)
                evicted = [] if is_whole else chance.sample(sorted({*pool} - {*cached}), 20)
                model[engine] = ({*()} if is_whole else model[engine] - {*evicted}) | {*cached}
                index.learn(engine, cached, evicted, is_whole=is_whole)
        prompt = chance.choice(prompts)
        for engine, has in model.items():
            blocks = [each in has for each in hashes(prompt=prompt)]
            last = max((number for number, is_known in enumerate(blocks, 1) if is_known), default=0)
            keys = PromptPrefixes(Terms(), prompt).keys(BLOCK)
            assert index.num_known(keys).get(engine, 0) == [*blocks, False].index(False)
            assert index.num_known(keys, has_window=True).get(engine, 0) == last
        assert index.num_known(PromptPrefixes(Terms(), prompt).keys(BLOCK)).keys() <= model.keys()
    for _ in range(3):  # ends the sweep, sweeps what went meanwhile
        index.learn("the last", [], [], is_whole=False)
    for engine in list(model):
        index.learn(engine, [], pool, is_whole=False)
    assert not index._masks and not index._retired


def test_an_index_holds_one_integer_for_all_prefixes_of_one_engine() -> None:
    index = PrefixIndex()
    for engine in range(40):
        chance = random.Random(engine)
        index.learn(engine, [chance.randbytes(8) for _ in range(300)], [], is_whole=True)
    masks = index._masks.values()
    assert len(masks) == 40 * 300 and len({id(mask) for mask in masks}) == 40


@pytest.mark.parametrize("owner", ["", "a"])
async def test_a_front_knows_what_an_engine_has_computed_for_another_front(owner: str) -> None:
    async with FleetOfEngines(quick) as fleet, FleetOfEngines(quick) as others:
        for each in (fleet, others):
            each.fleet._callers = Callers(IngressArgs(api_key_digests=["0" * 64]))
        await fleet.start()
        engine = await fleet.start()
        assert engine.invitation is not None
        await others.fleet.meet(engine.invitation)
        answer = await _ask(others, PREFIX, SamplingParams(temperature=0.0, max_tokens=2 * BLOCK), owner)
        prompt, scope = [*PREFIX, *answer], engine_of(others.fleet, None).cache_scope(owner)
        assert bool(scope) == bool(owner)
        link = _link(fleet, engine)
        await until(lambda: num_known(link.prefixes, link, scope, prompt=prompt) == (len(prompt) - 1) // BLOCK)
        await _ask(fleet, prompt, owner=owner)
        assert engine.service.loop.num_requests == 2


async def test_a_front_knows_what_an_engine_had_computed_before_they_met() -> None:
    async with FleetOfEngines(quick) as fleet, FleetOfEngines(quick) as late:
        engine = await fleet.start()
        await _ask(fleet, PREFIX)
        assert engine.invitation is not None
        await late.fleet.meet(engine.invitation)
        link = _link(late, engine)
        await until(lambda: num_known(link.prefixes, link) == 4)


async def test_a_front_forgets_what_an_engine_has_evicted_or_lost_with_its_ranks() -> None:
    async with FleetOfEngines(lambda: quick(num_blocks=40)) as fleet:
        engine = await fleet.start()
        link = _link(fleet, engine)
        index = link.prefixes
        long = [3] * 20 * BLOCK
        await _ask(fleet, PREFIX)
        await until(lambda: num_known(index, link) == 4)
        await _ask(fleet, [2] * 20 * BLOCK)
        await _ask(fleet, long)
        await until(lambda: num_known(index, link) == 0)
        assert num_known(index, link, prompt=long) == 20
        engine.groups.made[-1].fail()
        await until(lambda: num_known(index, link, prompt=long) == 0)


async def test_equal_prompts_that_arrive_together_go_to_one_engine() -> None:
    async with FleetOfEngines(quick) as fleet:
        engines = [await fleet.start(), await fleet.start()]
        prompt = [1, *range(3, 3 + 20 * BLOCK)]
        asked = [asyncio.create_task(fleet.submit(prompt, GREEDY)) for _ in range(2)]
        streams = [stream for each in await asyncio.gather(*asked) for stream in each]
        assert sorted(engine.service.loop.num_requests for engine in engines) == [0, 2]
        for stream in streams:
            await read(stream)


async def test_prompts_with_one_prefix_go_to_one_engine_until_it_is_busy() -> None:
    async with FleetOfEngines(quick) as fleet:
        first, second = await fleet.start(), await fleet.start()
        for number in range(6):
            await _ask(fleet, [*PREFIX, 5 + number])
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
