"""Engines over fake ranks, and a front that is connected with them: by real sockets, or by a virtual network.

Each is a process of its own, which a virtual network can stop, kill or cut off.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from deployments.args import EngineArgs, IngressArgs
from deployments.engine.callers import Callers
from deployments.engine.sequence_stream import SequenceStream
from deployments.fleet.cluster import ENGINE
from deployments.fleet.fleet import Fleet
from deployments.links.engine_link import EngineLink
from deployments.links.front_server import FrontServer
from deployments.links.invitation import Invitation
from deployments.observe.metrics import Metrics
from deployments.openai.plan import engine_of
from deployments.replicas.engine_process import EngineProcess
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support.fake_cluster import NODE, FakeCluster, Member, QuietMetrics, Replica
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.fake_ranks import arbitrary
from tests.support.requests import request_of
from tests.support.virtual_loop import VirtualLoop
from tests.support.virtual_network import Process


def seeded() -> FakeGroup:
    """Whose tokens depend on the seed and on the adapter."""
    group = FakeGroup(num_blocks=400, step_s=0.003)
    group.ranks.model = arbitrary
    return group


class FakeEngineProcess:
    """`engine` over fake ranks, as a process of its own."""

    def __init__(
        self, make: Callable[[], FakeGroup], member: Member | None = None, metrics: Metrics | None = None, **args: Any
    ) -> None:
        given = {"ckpt_dir": str(GOLDEN / "mp2"), "max_seq_len": 512, "max_batch_size": 8, "model_id": "demo"} | args
        self.groups = FakeGroupPool(make)
        self.process = Process("engine")
        self.member = member or Member(FakeCluster())
        self.engine = self.process.call(
            lambda: EngineProcess(EngineArgs(**given), self.groups, self.member, metrics or QuietMetrics())
        )
        self.service = self.engine.service
        self.invitation: Invitation | None = None

    @property
    def server(self) -> FrontServer | None:
        return self.engine.fronts

    async def start(self) -> Invitation:
        await self.process.run(self.engine.start())
        self.invitation = await self.engine.invitation()
        self.member.cluster.replicas.append(Replica(ENGINE, self.process, self.engine))
        return self.invitation

    def die(self) -> None:
        """As a process that is killed: its connections end, and nothing of it computes any more."""
        assert self.server is not None
        self.server.close()
        self.member.cluster.remove(self.engine)

    async def stop(self) -> None:
        if self.server is not None:
            self.server.close()
        await self.engine.adapters.stop()
        await self.service.stop()


class FleetOfEngines:
    """A front, and engines that `start` adds."""

    def __init__(self, make: Callable[[], FakeGroup] = FakeGroup, *, hold_timeout_s: float = 60.0) -> None:
        self.fleet = Fleet(NODE, Callers(IngressArgs()), hold_timeout_s)
        self.process = Process("front")
        self.engines: list[FakeEngineProcess] = []
        self.cluster = FakeCluster()
        self._make = make

    async def start(
        self, node: str = NODE, *, application: str = "", weights: str = "", **args: Any
    ) -> FakeEngineProcess:
        """An engine that the front has met."""
        engine = FakeEngineProcess(self._make, Member(self.cluster, application, node), **args)
        self.engines.append(engine)
        engine.invitation = replace(await engine.start(), weights=weights)
        await self.meet(engine.invitation)
        return engine

    async def meet(self, invitation: Invitation) -> str:
        return await self.process.run(self.fleet.meet(invitation))

    @property
    def links(self) -> list[EngineLink]:
        """Of the model `demo`."""
        return cast(list[EngineLink], self.fleet._models["demo"].links)

    async def submit(self, prompt: list[int], params: SamplingParams, **options: Any) -> list[SequenceStream]:
        engine = engine_of(self.fleet, None)
        streams = await self.process.run(engine.submit(request_of(prompt, params, **options)))
        return cast(list[SequenceStream], streams)

    async def __aenter__(self) -> "FleetOfEngines":
        return self

    async def __aexit__(self, *_: object) -> None:
        if isinstance(loop := asyncio.get_running_loop(), VirtualLoop):
            loop.network.end_faults()
        await self.fleet.stop()
        await asyncio.gather(*(engine.stop() for engine in self.engines))
