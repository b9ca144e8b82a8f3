"""What a process without an engine's key, and a front that sends nonsense, can do: nothing to others."""

import asyncio
import dataclasses

import pytest

from cluster.wire.messages import WireError, frame
from cluster.wire.tls import make_group_key
from deployments.links import messages
from deployments.links.affinity import PrefixIndex
from deployments.links.engine_link import EngineLink
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_cluster import NODE
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fleets import FleetOfEngines
from tests.support.recovering_service import read, steady

PARAMS = SamplingParams(temperature=0.0, max_tokens=20)


def quick() -> FakeGroup:
    return FakeGroup(num_blocks=400, step_s=0.002, token=steady)


@pytest.mark.parametrize("node", [NODE, "another node"])
@pytest.mark.parametrize("wrong", ["secret", "key"])
async def test_a_process_without_the_engines_key_is_refused(node: str, wrong: str) -> None:
    async with FleetOfEngines(quick) as fleet:
        engine = await fleet.start(node)
        assert engine.invitation is not None
        changes = {"secret": b"wrong"} if wrong == "secret" else {"key": make_group_key(), "node": "another node"}
        stranger = EngineLink(dataclasses.replace(engine.invitation, **changes), PrefixIndex())
        with pytest.raises((OSError, WireError)):
            await stranger.connect(NODE, ())
        (stream,) = await fleet.submit([1, 5], PARAMS)
        assert len(await read(stream)) == 20


@pytest.mark.parametrize(
    "nonsense",
    [
        pytest.param(b"\xff\xff\xff\xff", id="a length over the limit"),
        pytest.param(frame(b"nonsense"), id="another message"),
        pytest.param(frame(messages.Accepted(1)), id="a message of the other side"),
        pytest.param(frame(messages.Cancel([1, 2, 99])), id="streams of another front"),
        pytest.param(frame(messages.Submit(9, Request([[1, 5]], [PARAMS], n=2**40))), id="very many choices"),
        pytest.param(frame(messages.Submit(9, Request([[1, 5]], []))), id="a prompt without parameters"),
        pytest.param(2 * frame(messages.Submit(9, Request([[1, 5]], [PARAMS]))), id="a number twice"),
    ],
)
async def test_a_bad_frame_of_a_front_costs_the_engine_at_most_that_connection(nonsense: bytes) -> None:
    async with FleetOfEngines(quick) as fleet, FleetOfEngines(quick) as other:
        engine = await fleet.start()
        assert engine.invitation is not None
        await other.fleet.meet(engine.invitation)
        (stream,) = await fleet.submit([1, 5], PARAMS)
        (link,) = other.links
        assert link._transport is not None
        link._transport.write(nonsense)
        assert len(await read(stream)) == 20
        (stream,) = await other.submit([1, 5], PARAMS) if link in other.links else [stream]
        assert stream.ended or len(await read(stream)) == 20


async def test_a_front_that_does_not_read_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.links.front_server.MAX_UNREAD_BYTES", 1000)
    async with FleetOfEngines(quick) as fleet:
        engine = await fleet.start()
        assert engine.server is not None
        (link,) = fleet.links
        assert link._transport is not None
        link._transport.pause_reading()
        for _ in range(2000):
            engine.server.beat()
        await until(lambda: not engine.server or not engine.server.sessions)


@pytest.mark.parametrize("protocol", [messages.PROTOCOL + 1, messages.PROTOCOL + 2])
async def test_versions_one_apart_work_together_and_further_apart_streams_are_held(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, protocol: int
) -> None:
    async with FleetOfEngines(quick) as fleet:
        first = await fleet.start()
        (stream,) = await fleet.submit([1, 5], PARAMS)
        await until(lambda: stream.sequence.length > 3)
        monkeypatch.setattr("deployments.links.front_server.PROTOCOL", protocol)
        monkeypatch.setattr("deployments.links.engine_link.PROTOCOL", 2 * messages.PROTOCOL - protocol)
        other = await fleet.start()
        assert other.server is not None and len(other.server.sessions) == (protocol == messages.PROTOCOL + 1)
        first.die()
        if protocol == messages.PROTOCOL + 1:
            assert len(await read(stream)) == 20
        else:
            await asyncio.sleep(0.1)
            assert not stream.ended and fleet.fleet.readiness().phase == "recovering"
            assert f"its protocol is {protocol}: update engines and fronts one version at a time" in caplog.text


async def test_an_engine_forgets_the_streams_of_a_connection_that_it_closes() -> None:
    async with FleetOfEngines(quick) as fleet:
        engine = await fleet.start()
        (link,) = fleet.links
        assert link._transport is not None
        link._transport.write(20 * frame(messages.Submit(9, Request([[1, 5]], [PARAMS]))))
        await until(lambda: not engine.service.loop.num_live)


async def test_a_front_forgets_engines_that_have_left_and_texts_that_no_engine_has() -> None:
    async with FleetOfEngines(quick) as fleet:
        for number in range(3):
            engine = await fleet.start(
                model_id=f"model {number}", tool_format=("hermes", "mistral", "llama3_json")[number]
            )
            assert engine.server is not None
            await engine.server.hand_over(False, 1.0)
            engine.die()
            await until(lambda: not fleet.fleet._met)
        await fleet.start(model_id="last")
        assert len(fleet.fleet._texts) == 1
