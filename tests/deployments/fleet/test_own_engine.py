"""A front and an engine in one process: what the link of calls must keep of a stream, and what a front may send."""

import asyncio
import contextlib
import gc
from typing import Any

import pytest

from cluster.wire.messages import WireError
from deployments.fleet.own_engine import OwnEngine
from deployments.links import messages
from deployments.links.front_session import FrontSession
from llama_core.errors import QueueFull
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.loop_engine import greedy, running
from tests.support.recovering_service import Group, RecoveringService, gated, read, steady
from tests.support.requests import request_of, submit
from tests.support.virtual_loop import VirtualLoop

LOOPS = {"virtual time": VirtualLoop}
PROMPT = [1, 5]


async def suspended(engine: OwnEngine, stream: Any) -> Any:
    await until(lambda: stream.sequence.length > len(PROMPT) + 2)
    stream.suspend()
    return stream


async def test_a_stream_whose_client_comes_back_while_ranks_recover_goes_on() -> None:
    async with RecoveringService(lambda: Group(steady)) as served:
        stream, gate = await suspended(served.front, served.ask(PROMPT, 20)), asyncio.Event()
        served.groups.make = lambda: gated(Group(steady), gate)
        served.groups.made[0].fail()
        await until(lambda: served.service.readiness().phase == "recovering")
        await asyncio.sleep(1.0)  # the front has heard of it
        for _ in range(2):  # and once more just afterwards, when the front has not heard of the end of the recovery
            await served.front.readmit([stream])
            assert not stream.ended
            gate.set()
            await until(lambda: served.service.readiness().ready)
            await suspended(served.front, stream)
        await served.front.readmit([stream])
        assert await read(stream) == continuation(PROMPT, 20, steady)


async def test_a_stream_that_comes_back_to_a_full_queue_keeps_its_tokens() -> None:
    group = FakeGroup(token=steady, step_s=0.001)
    async with running(group, slots=1, max_waiting=1) as engine:
        stream = await suspended(engine, submit(engine, PROMPT, greedy(20), owner="a"))
        others = [submit(engine, [1, 7 + n], greedy(20), owner="a") for n in range(2)]
        with pytest.raises(QueueFull):
            await engine.readmit([stream])
        assert not stream.ended and stream.sequence.output
        for other in others:
            await read(other)
        await engine.readmit([stream])
        assert await read(stream) == continuation(PROMPT, 20, steady)


def num_requests() -> int:
    return sum(type(each) is Request for each in gc.get_objects())


async def test_a_refused_request_leaves_nothing_to_the_garbage_collector() -> None:
    async with running(FakeGroup(), slots=1, max_waiting=2) as engine:
        streams = [submit(engine, PROMPT, greedy()) for _ in range(2)]
        gc.collect()
        gc.disable()
        try:
            before = num_requests()
            with contextlib.suppress(QueueFull):
                await engine.submit(request_of(PROMPT, greedy(), n=2))
            assert num_requests() == before
        finally:
            gc.enable()
        for stream in streams:
            stream.cancel()


async def test_requests_that_end_with_a_stop_string_count_for_the_time_to_retry() -> None:
    async with running(FakeGroup(token=lambda tokens: 5)) as engine:
        piece = engine.text.text.tokenizer.decode([5])
        for _ in range(3):
            await read(submit(engine, PROMPT, greedy(30), stop=[piece * 4]))
        assert len(engine.loop._retry._ends) == 3


class Noting(FrontSession):
    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self.sent: list[Any] = []

    def send(self, message: messages.FromEngine) -> None:
        self.sent.append(message)

    def close(self, reason: str, level: int = 0) -> None: ...


@pytest.mark.parametrize(("number", "n"), [(2**63 - 1, 1), (0, 1), (1, 1), (1, 2**40), (3, 2**63)])
async def test_a_front_cannot_give_a_stream_a_number_that_none_may_have(number: int, n: int) -> None:
    async with running(FakeGroup(step_s=1.0)) as engine:
        assert engine.fronts is not None
        session = Noting(engine.fronts)
        session.take(messages.Submit(1, Request([PROMPT], [SamplingParams()])))
        with pytest.raises(WireError, match="number"):
            session.take(messages.Submit(number, Request([PROMPT], [SamplingParams()], n=n)))
        session.take(messages.Submit(2, Request([PROMPT], [SamplingParams()], n=2**40)))
        assert isinstance(session.sent[-1], messages.Refused) and "choices" in session.sent[-1].fault.message
        session.cancel([1])
        assert engine.num_live == 0
