"""Engines over fake ranks, and a front that is connected with them: by real sockets, or by a virtual network.

Each is a process of its own, which a virtual network can stop, kill or cut off.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deployments.args import EngineArgs, IngressArgs
from deployments.engine.callers import Callers
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.service import LlamaService
from deployments.fleet import model_files
from deployments.fleet.fleet import Fleet
from deployments.fleet.front_server import FrontServer
from deployments.fleet.invitation import Invitation
from deployments.fleet.loaded_adapters import AdapterCalls, LoadedAdapters
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.fake_ranks import arbitrary
from tests.support.virtual_loop import VirtualLoop
from tests.support.virtual_network import Process

NODE = "this node"


def seeded() -> FakeGroup:
    """Whose tokens depend on the seed and on the adapter."""
    group = FakeGroup(num_blocks=400, step_s=0.003)
    group.ranks.model = arbitrary
    return group


class FakeEngineProcess(AdapterCalls):
    """What the process of `LlamaEngine` has."""

    def __init__(self, make: Callable[[], FakeGroup], **args: Any) -> None:
        given = {"ckpt_dir": str(GOLDEN / "mp2"), "max_seq_len": 512, "max_batch_size": 8, "model_id": "demo"} | args
        self.groups = FakeGroupPool(make)
        self.service = LlamaService(
            EngineArgs(**given),
            lambda: self.groups,
            on_failure=lambda error: None if self.server is None else self.server.beat(),
        )
        self.adapters = LoadedAdapters(
            self.service, lambda: None if self.server is None else self.server.tell_adapters()
        )
        self.server: FrontServer | None = None
        self.invitation: Invitation | None = None
        self._args = EngineArgs(**given)
        self.process = Process("engine")
        self.is_gone = False  # for a test

    async def start(self, node: str = NODE) -> Invitation:
        return await self.process.run(self._start(node))

    async def _start(self, node: str) -> Invitation:
        if self._args.lora_root:
            await self.adapters.sync()
        await self.service.start()
        files = model_files.pack(self._args, self.service.num_rows, self.service.vocab_size)
        self.server = FrontServer(self.service, files)
        self.invitation = await self.server.open(node, "127.0.0.1")
        return self.invitation

    def die(self) -> None:
        """As a process that is killed: its connections end, and nothing of it computes any more."""
        assert self.server is not None
        self.server.close()

    async def stop(self) -> None:
        if self.server is not None:
            self.server.close()
        await self.service.stop()


class FleetOfEngines:
    """A front, and engines that `start` adds."""

    def __init__(self, make: Callable[[], FakeGroup] = FakeGroup, *, hold_timeout_s: float = 60.0) -> None:
        self.fleet = Fleet(NODE, Callers(IngressArgs()), hold_timeout_s)
        self.process = Process("front")
        self.engines: list[FakeEngineProcess] = []
        self._make = make

    async def start(
        self, node: str = NODE, *, application: str = "", weights: str = "", **args: Any
    ) -> FakeEngineProcess:
        """An engine that the front has met."""
        engine = FakeEngineProcess(self._make, **args)
        self.engines.append(engine)
        engine.invitation = replace(await engine.start(node), application=application, weights=weights)
        await self.meet(engine.invitation)
        return engine

    async def meet(self, invitation: Invitation) -> str:
        return await self.process.run(self.fleet.meet(invitation))

    async def submit(self, prompt: list[int], params: SamplingParams, **options: Any) -> list[SequenceStream]:
        return list(await self.process.run(self.fleet.submit(Request([prompt], [params], **options))))

    async def __aenter__(self) -> "FleetOfEngines":
        return self

    async def __aexit__(self, *_: object) -> None:
        if isinstance(loop := asyncio.get_running_loop(), VirtualLoop):
            loop.network.end_faults()
        await self.fleet.stop()
        await asyncio.gather(*(engine.stop() for engine in self.engines))
