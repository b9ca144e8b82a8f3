"""The life of an engine for fronts, from its start until it has handed its streams over. Knows nothing of Ray."""

from dataclasses import replace
from typing import Any

from deployments.args import EngineArgs
from deployments.engine.live_streams import MeasuredStream
from deployments.engine.service import LlamaService
from deployments.engine.step_report import StepStats
from deployments.engine.supervisor import GroupPool
from deployments.fleet.cluster import FRONT, Cluster
from deployments.fleet.engine_clock import EngineClock
from deployments.fleet.loaded_adapters import AdapterCalls, LoadedAdapters
from deployments.fleet.successor import Successor
from deployments.links import model_files
from deployments.links.front_server import FrontServer
from deployments.links.invitation import Invitation
from deployments.observe.metrics import Metrics
from llama_core.errors import ConfigError, LlamaError


class EngineProcess(AdapterCalls):
    """One engine, for every front of the cluster. Call `start`, later `end`."""

    def __init__(self, args: EngineArgs, pool: GroupPool, cluster: Cluster, metrics: Metrics) -> None:
        self.fronts: FrontServer | None = None
        self.clock = EngineClock()
        self.service = LlamaService(
            args,
            pool,
            on_step=self._on_step,
            on_failure=self._on_failure,
            on_compute_ms=metrics.on_compute_ms,
            on_end=self._on_end,
        )
        metrics.watch(self.service)
        self.adapters = LoadedAdapters(self.service, cluster, self._tell_adapters)
        self._args, self._cluster, self._metrics = args, cluster, metrics

    async def start(self) -> None:
        """Returns when fronts have been invited. Raises LlamaError if no start can succeed."""
        try:
            if self._args.lora_root:
                await self.adapters.start()
            await self.service.start()
            files = model_files.pack(self._args, self.service.num_rows, self.service.vocab_size)
            self.fronts = FrontServer(self.service, files)
            self._successor = Successor(self._args, self._cluster)
            opened = await self.fronts.open(self._cluster.node, self._cluster.host)
            weights = self.service.describe().checkpoint_digest
            self._invitation = replace(opened, application=self._cluster.application, weights=weights)
            if refusals := list(filter(None, await self._cluster.call_all(FRONT, "meet", self._invitation))):
                raise ConfigError(refusals[0], param="model_id")
        except BaseException:
            if self.fronts is not None:
                self.fronts.close()
            await self.service.stop()
            raise

    async def invitation(self) -> Invitation:
        """For a front of this cluster. It has the key to this engine."""
        return self._invitation

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change limits and sampling defaults while requests run. Raises ConfigError for other arguments."""
        self.service.reconfigure(user_config)

    async def drain(self, engine: str) -> bool:
        """Hand the streams of the engine with this id (`engines` of GET /props) to others; it takes none from then on. Streams
        that no other engine can continue end here. Serve keeps the replica: end it, or its node, afterwards. False for another
        id: call all replicas, by `broadcast`."""
        if self.fronts is None or engine != self.fronts.engine:
            return False
        await self.fronts.hand_over(has_successor=False, timeout_s=self.service.args.drain_timeout_s)
        return True

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For the policies of `scaling.py`. Serve calls it every few seconds."""
        held = (0, 0) if self.fronts is None else self.fronts.held
        return self.clock.read(self.service.loop, *held)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self.service.live():
            raise RuntimeError(self.service.readiness().detail or "no step completes")

    async def end(self) -> None:
        if self.fronts is not None:
            await self.fronts.hand_over(await self._successor.is_coming(), self.service.args.drain_timeout_s)
            self.fronts.close()
        await self.adapters.stop()
        await self.service.stop()

    def _tell_adapters(self) -> None:
        if self.fronts is not None:
            self.fronts.tell_adapters()

    def _on_step(self, stats: StepStats) -> None:
        self._metrics.on_step(stats)
        if not self.service.loop.scheduler.is_background:  # such work waits for idle engines, and needs no others
            self.clock.on_step(stats)

    def _on_end(self, stream: MeasuredStream) -> None:
        self._metrics.on_end(stream)
        self.clock.on_end(stream)

    def _on_failure(self, error: LlamaError) -> None:
        self._metrics.on_failure(error)
        if self.fronts is not None:
            self.fronts.beat()
