"""An engine for fronts: the deployment of an application that `build_engine` makes. It has no route."""

import logging
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from deployments.args import EngineArgs
from deployments.engine.service import LlamaService
from deployments.engine.step_report import StepStats
from deployments.fleet import directory, model_files
from deployments.fleet.front_server import FrontServer
from deployments.fleet.invitation import Invitation
from deployments.fleet.loaded_adapters import AdapterCalls, LoadedAdapters
from deployments.fleet.scaling import SEQUENCES
from deployments.fleet.successor import Successor
from deployments.ingress import collect_garbage_rarely, pool_for
from deployments.local.small_cluster import keep_replica_on_loopback
from deployments.observe.metrics import Metrics
from deployments.observe.replica_log import log_like_serve
from llama_core.errors import ConfigError, LlamaError

log = logging.getLogger(__name__)


class LlamaEngine(AdapterCalls):
    """One replica: a service over the ranks of this replica's own placement group, for every front of the cluster."""

    async def __init__(self, args: EngineArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        """Raises LlamaError if no start can succeed; Serve then reports the deployment as failed."""
        keep_replica_on_loopback()
        log_like_serve(args.log_format)
        self._fronts: FrontServer | None = None
        self._metrics = Metrics(model_name=args.model_id)
        self._service = LlamaService(
            args,
            pool_for(args),
            on_step=self._on_step,
            on_failure=self._on_failure,
            on_compute_ms=self._metrics.on_compute_ms,
            on_end=self._metrics.on_end,
        )
        self._metrics.watch(self._service)
        self.adapters = LoadedAdapters(self._service, self._tell_adapters)
        try:
            if args.lora_root:
                await self.adapters.start()
            await self._service.start()
            files = model_files.pack(args, self._service.num_rows, self._service.vocab_size)
            self._fronts = FrontServer(self._service, files)
            self._successor = Successor(args)
            node = ray.get_runtime_context().get_node_id()
            opened = await self._fronts.open(node, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
            application, weights = serve.get_replica_context().app_name, self._service.describe().checkpoint_digest
            self._invitation = replace(opened, application=application, weights=weights)
            if refusal := await directory.invite(self._invitation):
                raise ConfigError(refusal, param="model_id")
        except BaseException:
            await self._service.stop()
            raise
        collect_garbage_rarely()

    async def invitation(self) -> Invitation:
        """For a front of this cluster. It has the key to this engine."""
        return self._invitation

    async def __call__(self, request: Request) -> Response:
        """Serve gives the first deployment of an application a port for HTTP. Only fronts serve HTTP."""
        text = "An engine serves no HTTP: send requests to the application llama.\n"
        return Response(text, 404, {"Connection": "close"})

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change limits and sampling defaults while requests run. Raises ConfigError for other arguments."""
        self._service.reconfigure(user_config)

    async def drain(self, engine: str) -> bool:
        """Hand the streams of the engine with this id (`engines` of GET /props) to others; it takes none from then on. Streams
        that no other engine can continue end here. Serve keeps the replica: end it, or its node, afterwards. False for another
        id: call all replicas, by `broadcast`."""
        if self._fronts is None or engine != self._fronts.engine:
            return False
        await self._fronts.hand_over(has_successor=False, timeout_s=self._service.args.drain_timeout_s)
        return True

    async def record_autoscaling_stats(self) -> dict[str, int]:
        """For `by_sequences`."""
        scheduler = self._service.loop.scheduler
        return {SEQUENCES: scheduler.num_running + scheduler.num_waiting}

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self._service.live():
            raise RuntimeError(self._service.readiness().detail or "no step completes")

    async def __del__(self) -> None:
        service = getattr(self, "_service", None)
        if service is None:
            return
        if self._fronts is not None:
            await self._fronts.hand_over(await self._successor.is_coming(), self._service.args.drain_timeout_s)
            self._fronts.close()
        await service.stop()

    def _tell_adapters(self) -> None:
        if self._fronts is not None:
            self._fronts.tell_adapters()

    def _on_step(self, stats: StepStats) -> None:
        self._metrics.on_step(stats)
        if self._fronts is not None:
            self._fronts.elapsed_ms = stats.elapsed_ms

    def _on_failure(self, error: LlamaError) -> None:
        self._metrics.on_failure(error)
        if self._fronts is not None:
            self._fronts.beat()
