"""A front and engines on a virtual clock, with a virtual network between them."""

import asyncio
import time

import pytest

from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.fleets import FleetOfEngines
from tests.support.recovering_service import read, steady
from tests.support.virtual_loop import BOTH_ORDERS, VirtualLoop, network

LOOPS = BOTH_ORDERS
PROMPT = [1, *range(3, 40)]
STEP_S = 0.1


def paced() -> FakeGroup:
    return FakeGroup(num_blocks=400, step_s=STEP_S, token=steady)


@pytest.mark.parametrize("node", ["this node", "another node"])
@pytest.mark.parametrize("fault", ["partition", "partition of one direction", "stop", "power", "kill"])
async def test_a_stream_goes_on_when_its_engine_is_gone(node: str, fault: str) -> None:
    began_s = time.perf_counter()
    async with FleetOfEngines(paced) as fleet:
        for _ in range(2):
            await fleet.start(node)
        (stream,) = await fleet.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=80))
        await until(lambda: stream.sequence.length > 45)
        (engine,) = [engine for engine in fleet.engines if engine.service.loop.num_live]
        cut_s = time.monotonic()
        if fault.startswith("partition"):
            network().silence(engine.process, fleet.process, both=fault == "partition")
        else:
            {"stop": network().stop, "power": network().lose_power, "kill": network().kill}[fault](engine.process)
        length = stream.sequence.length
        await until(lambda: stream.sequence.length > length + 2)
        assert time.monotonic() - cut_s < (5 * STEP_S if fault == "kill" else 2.0 + 5 * STEP_S)
        assert await read(stream) == continuation(PROMPT, 80, steady)
        assert time.monotonic() - cut_s > 50 * STEP_S
    assert time.perf_counter() - began_s < 10, "its seconds are virtual"


async def test_tokens_that_a_suspected_engine_sent_before_never_reach_a_stream_that_is_sent_again() -> None:
    """The engine has taken a request, but all that it says waits in the network until the front has given it up."""
    params = SamplingParams(temperature=0.0, max_tokens=80)
    async with FleetOfEngines(paced) as fleet:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await fleet.start()
        for token in range(3, 7):
            await fleet.submit([1, 9, token], params)
        idle = await fleet.start()
        _, link = fleet.links
        network().silence(idle.process, fleet.process, both=False)
        submitting = asyncio.ensure_future(fleet.submit(PROMPT, params))
        await until(lambda: idle.service.loop.num_live)

        def heal() -> None:
            if link.is_suspected:
                network().heal()

        loop.after_each.append(heal)
        (stream,) = await submitting
        loop.after_each.remove(heal)
        assert await read(stream) == continuation(PROMPT, 80, steady)
