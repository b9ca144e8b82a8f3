"""A front and engines on a virtual clock, with a virtual network between them."""

import asyncio
import time

import pytest

from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.fleets import FleetOfEngines
from tests.support.recovering_service import read, steady
from tests.support.virtual_loop import BOTH_ORDERS, VirtualLoop
from tests.support.virtual_network import Network

LOOPS = BOTH_ORDERS
PROMPT = [1, *range(3, 40)]
STEP_S = 0.05


def paced() -> FakeGroup:
    return FakeGroup(num_blocks=400, step_s=STEP_S, token=steady)


def network() -> Network:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.network


@pytest.mark.parametrize("node", ["this node", "another node"])
@pytest.mark.parametrize("fault", ["partition", "partition of one direction", "stop", "power", "kill"])
async def test_a_stream_goes_on_when_its_engine_is_gone(node: str, fault: str) -> None:
    began_s = time.perf_counter()
    async with FleetOfEngines(paced) as fleet:
        for _ in range(2):
            await fleet.start(node)
        (stream,) = await fleet.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=200))
        await until(lambda: stream.sequence.length > 60)
        (engine,) = [engine for engine in fleet.engines if engine.service.loop.num_live]
        cut_s = time.monotonic()
        if fault.startswith("partition"):
            network().silence(engine.process, fleet.process, both=fault == "partition")
        else:
            {"stop": network().stop, "power": network().lose_power, "kill": network().kill}[fault](engine.process)
        length = stream.sequence.length
        await until(lambda: stream.sequence.length > length + 2)
        assert time.monotonic() - cut_s < (0.3 if fault == "kill" else 2.3)
        assert await read(stream) == continuation(PROMPT, 200, steady)
        assert time.monotonic() - cut_s > 100 * STEP_S
    assert time.perf_counter() - began_s < 5, "its seconds are virtual"
