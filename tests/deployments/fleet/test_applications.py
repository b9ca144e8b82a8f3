"""Applications that come, go, claim one name, or change while their models' streams run."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from cluster.wire.tls import GroupKey
from deployments.args import IngressArgs
from deployments.engine.sequence_stream import SequenceStream
from deployments.fleet.cluster import FRONT
from deployments.links.engine_link import EngineLink
from deployments.links.invitation import Invitation
from deployments.openai.errors import ModelNotFound
from deployments.openai.plan import engine_of
from deployments.replicas.engine_process import EngineProcess
from deployments.replicas.front_process import RECONFIGURABLE, FrontProcess
from llama_core.errors import ConfigError, NotReady
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_cluster import FakeCluster, Member, QuietMetrics, Replica
from tests.support.fake_rank_group import FakeGroup, until
from tests.support.fake_ranks import continuation
from tests.support.fleets import FakeEngineProcess, FleetOfEngines
from tests.support.recovering_service import read, steady
from tests.support.virtual_loop import BOTH_ORDERS
from tests.support.virtual_network import Process

LOOPS = BOTH_ORDERS
PROMPT = [1, *range(3, 40)]
LONG = SamplingParams(temperature=0.0, max_tokens=60)


def paced() -> FakeGroup:
    return FakeGroup(num_blocks=400, step_s=0.05, token=steady)


async def begin(fleet: FleetOfEngines) -> Any:
    """A stream of the first model that has some tokens."""
    (stream,) = await fleet.submit(PROMPT, LONG)
    await until(lambda: stream.sequence.length > len(PROMPT) + 4)
    return stream


async def test_a_model_of_a_removed_application_is_gone_and_its_streams_end_on_their_engine() -> None:
    async with FleetOfEngines(paced, hold_timeout_s=600) as fleet:
        engine = await fleet.start(model_id="a", application="one")
        await fleet.start(model_id="b", application="two")
        stream = await begin(fleet)
        assert engine.server is not None
        ending = asyncio.create_task(engine.server.hand_over(has_successor=False, timeout_s=60))
        await until(fleet.fleet.unserved.is_set)
        (held,) = await fleet.submit([1, 5], LONG)
        began_s = time.monotonic()
        await fleet.fleet.keep({"two", "llama"})
        assert set(fleet.fleet.models) == {"b"} and fleet.fleet.model_id == "b"
        with pytest.raises(ModelNotFound):
            engine_of(fleet.fleet, "a")
        with pytest.raises(NotReady, match="the application of a has been removed"):
            await read(held)
        assert time.monotonic() - began_s < 1
        assert await read(stream) == continuation(PROMPT, 60, steady)
        await ending
        engine.die()
        await until(lambda: len(fleet.fleet.describe().engines) == 1)
        await fleet.fleet.keep({"two", "llama"})
        await fleet.start(model_id="a", application="one")  # deployed again
        assert set(fleet.fleet.models) == {"a", "b"}
        assert await read(await begin(fleet)) == continuation(PROMPT, 60, steady)


async def test_streams_of_a_removed_application_end_with_their_engine() -> None:
    async with FleetOfEngines(paced, hold_timeout_s=600) as fleet:
        engine = await fleet.start(application="one")
        stream = await begin(fleet)
        assert engine.server is not None
        ending = asyncio.create_task(engine.server.hand_over(has_successor=False, timeout_s=1))
        await until(fleet.fleet.unserved.is_set)
        await fleet.fleet.keep(set())
        await ending
        engine.die()
        with pytest.raises(NotReady, match="has been removed"):
            await read(stream)
        await fleet.fleet.keep(set())
        assert fleet.fleet.describe().engines == () and not fleet.fleet.readiness().takes_requests


async def test_streams_wait_while_their_application_stays() -> None:
    async with FleetOfEngines(paced, hold_timeout_s=600) as fleet:
        engine = await fleet.start(application="one")
        stream = await begin(fleet)
        engine.die()
        await until(fleet.fleet.unserved.is_set)
        await fleet.fleet.keep({"one"})
        assert set(fleet.fleet.models) == {"demo"}
        await fleet.start(application="one")
        assert await read(stream) == continuation(PROMPT, 60, steady)


async def test_a_model_is_gone_when_its_application_has_another_one() -> None:
    async with FleetOfEngines(paced) as fleet:
        former = await fleet.start(model_id="a", application="one")
        await fleet.start(model_id="b", application="one")
        await fleet.fleet.keep({"one"})
        assert set(fleet.fleet.models) == {"a", "b"}, "until its engine ends"
        assert former.server is not None
        await former.server.hand_over(has_successor=False, timeout_s=5)
        await until(fleet.fleet.unserved.is_set)
        await fleet.fleet.keep({"one"})
        assert set(fleet.fleet.models) == {"b"}


async def test_a_second_application_with_a_models_name_and_other_weights_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FleetOfEngines(paced) as fleet:
        first = await fleet.start(application="one", weights="v1")
        await fleet.start(application="same", weights="v1")
        second = await fleet.start(application="two", weights="v2")
        (refused,) = [engine for engine in fleet.fleet.describe().engines if engine.phase == "refused"]
        assert (refused.id, refused.model) == (second.service.engine_id, "demo")
        assert second.invitation is not None
        reason = await fleet.meet(second.invitation)
        assert "'two' is refused: 'one' has other weights for 'demo'" in reason
        assert [reason in record.message for record in caplog.records if record.levelno == logging.WARNING] == [True]
        update = await fleet.start(application="one", weights="v2")
        served = {engine.id for engine in fleet.fleet.describe().engines if engine.phase == "ready"}
        assert served == {first.service.engine_id, fleet.engines[1].service.engine_id, update.service.engine_id}
        await fleet.fleet.keep({"two"})
        assert not await fleet.meet(second.invitation)
        assert "refused" not in {engine.phase for engine in fleet.fleet.describe().engines}


async def test_a_name_is_free_when_its_application_has_had_no_engine_for_long() -> None:
    async with FleetOfEngines(paced, hold_timeout_s=30) as fleet:
        first = await fleet.start(application="one", weights="v1")
        first.die()
        second = await fleet.start(application="two", weights="v2")
        assert second.invitation is not None and await fleet.meet(second.invitation)
        await asyncio.sleep(31)
        await fleet.fleet.keep({"one", "two"})
        assert not await fleet.meet(second.invitation)


@pytest.mark.parametrize("later", [[], ["app", "weights", "a later field"]])
def test_an_invitation_of_another_release_is_read(later: list[str]) -> None:
    read = object.__new__(Invitation)
    read.__setstate__(["e", "m", "n", "/p", "h", 1, b"s", GroupKey("", ""), *later])
    assert (read.engine, read.secret, read.application) == ("e", b"s", later[0] if later else "")


async def test_a_model_whose_engines_tell_no_application_is_never_taken_for_removed() -> None:
    async with FleetOfEngines(paced) as fleet:
        await fleet.start()
        await fleet.fleet.keep(set())
        assert set(fleet.fleet.models) == {"demo"}


async def test_an_engine_that_is_met_twice_at_once_is_met_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first connection ends during its greeting, and the second begins before the first meeting has noticed."""
    async with FleetOfEngines(paced) as fleet:
        engine = await fleet.start()
        invitation = replace(fleet.links[0].invitation, engine="another")
        gate, links = asyncio.Event(), []

        async def connect(link: EngineLink, *args: Any) -> None:
            links.append(link)
            await gate.wait()
            raise OSError("refused")

        monkeypatch.setattr(EngineLink, "connect", connect)
        first = asyncio.create_task(fleet.fleet.meet(invitation))
        await until(lambda: len(links) == 1)
        links[0].is_lost = True
        second = asyncio.create_task(fleet.fleet.meet(invitation))
        await until(lambda: len(links) == 2)
        gate.set()
        assert list(await asyncio.gather(first, second)) == ["", ""]
        assert "another" not in fleet.fleet._met and engine.service.engine_id in fleet.fleet._met


async def test_an_engine_that_drains_says_so_to_fronts_that_come() -> None:
    async with FleetOfEngines(paced) as fleet, FleetOfEngines(paced) as late:
        engine = await fleet.start()
        stream = await begin(fleet)
        assert engine.server is not None and engine.invitation is not None
        ending = asyncio.create_task(engine.server.hand_over(has_successor=False, timeout_s=60))
        await until(lambda: engine.service.readiness().phase == "draining")
        await late.meet(engine.invitation)
        assert not late.fleet.readiness().ready
        assert await read(stream) == continuation(PROMPT, 60, steady)
        await ending


async def test_a_running_front_has_the_defaults_that_its_engines_have_now() -> None:
    async with FleetOfEngines(paced) as fleet:
        engine = await fleet.start(sampling_defaults="builtin")
        assert engine_of(fleet.fleet, None).sampling_defaults.temperature == 0.6
        engine.service.reconfigure({"sampling_defaults": "greedy"})
        await until(lambda: engine_of(fleet.fleet, None).sampling_defaults.temperature == 0.0)
        engine.service.reconfigure({"max_queue": 7})  # the value of the arguments, again
        await until(lambda: engine_of(fleet.fleet, None).sampling_defaults.temperature == 0.6)


async def test_limits_of_a_front_change_while_streams_wait() -> None:
    args = IngressArgs().changed({"hold_timeout_s": 2}, RECONFIGURABLE)
    with pytest.raises(ConfigError, match="seed cannot change without a restart; drain_timeout_s, hold_timeout_s can"):
        args.changed({"seed": 2}, RECONFIGURABLE)
    async with FleetOfEngines(paced, hold_timeout_s=600) as fleet:
        engine = await fleet.start()
        stream = await begin(fleet)
        engine.die()
        fleet.fleet.limit(args.hold_timeout_s, args.drain_timeout_s)
        began_s = time.monotonic()
        with pytest.raises(NotReady, match="within 2 s"):
            await read(stream)
        assert time.monotonic() - began_s < 4


@pytest.fixture
async def front() -> AsyncIterator[FrontProcess]:
    """Of the application llama, in a cluster of its own."""
    front = FrontProcess(IngressArgs(), Member(FakeCluster(), "llama"), QuietMetrics())
    yield front
    await front.end()


def cluster_of(front: FrontProcess) -> FakeCluster:
    assert isinstance(front._cluster, Member)
    front._cluster.cluster.replicas.append(Replica(FRONT, Process("front"), front))
    return front._cluster.cluster


async def test_a_search_begins_when_a_model_has_lost_its_engines(front: FrontProcess) -> None:
    cluster = cluster_of(front)
    cluster.running = {"llama", "one"}
    engine = FakeEngineProcess(paced, Member(cluster, "one"))
    await engine.start()
    await asyncio.sleep(60)
    assert set(front.fleet.models) == {"demo"}
    cluster.running = {"llama"}
    engine.die()
    (held,) = cast(list[SequenceStream], await engine_of(front.fleet, None).submit(Request([PROMPT], [LONG])))
    began_s = time.monotonic()
    with pytest.raises(NotReady, match="has been removed"):
        await read(held)
    assert time.monotonic() - began_s < 2.5
    assert not front.fleet.models
    await engine.stop()


async def test_nothing_is_removed_while_serves_controller_does_not_know_all_applications(front: FrontProcess) -> None:
    cluster = cluster_of(front)
    engine = FakeEngineProcess(paced, Member(cluster, "one"))
    await engine.start()
    cluster.running = {"another"}
    engine.die()
    await asyncio.sleep(30)
    assert set(front.fleet.models) == {"demo"}
    await engine.stop()


async def test_a_front_gets_requests_when_it_has_met_the_engines_of_all_models() -> None:
    """A model that it does not know yet would be 404."""
    cluster = FakeCluster(running={"llama", "one", "two"})
    engines = [FakeEngineProcess(paced, Member(cluster, name), model_id=name) for name in ("one", "two")]
    for engine in engines:
        await engine.start()
    slow = [replica._replace(target=Slow(replica.target)) for replica in cluster.replicas]
    cluster.replicas[:] = slow
    front = FrontProcess(IngressArgs(), Member(cluster, "llama"), QuietMetrics())
    await front.check_health()
    assert set(front.fleet.models) == {"one", "two"}
    await front.end()
    await asyncio.gather(*(engine.stop() for engine in engines))


class Slow:
    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine

    async def invitation(self) -> Invitation:
        await asyncio.sleep(5)
        return await self._engine.invitation()
