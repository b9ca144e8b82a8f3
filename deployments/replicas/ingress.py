"""The Serve deployment: a replica's start, health and end.

Its API by handle is in `handle_api`, by HTTP in `http.app`.
"""

import asyncio
import logging
import os
from dataclasses import asdict
from typing import Any

from ray import serve

from cluster.driver.ray_calls import in_passing_thread
from deployments.args import ServerArgs
from deployments.engine.service import LlamaService
from deployments.fleet.cluster import FRONT
from deployments.fleet.directory import RayCluster, http_address
from deployments.fleet.loaded_adapters import AdapterCalls, LoadedAdapters
from deployments.fleet.own_engine import OwnEngine
from deployments.handle.api import HandleApi
from deployments.local.banner import banner
from deployments.local.serve_run import SLOWER, is_behind_python_proxy
from deployments.local.small_cluster import keep_replica_on_loopback
from deployments.observe.metrics import Metrics
from deployments.observe.replica_log import log_like_serve
from deployments.observe.tracing import open_tracing
from deployments.replicas.common import collect_garbage_rarely, pool_for
from deployments.replicas.front_process import http_app_of, keys_of

log = logging.getLogger(__name__)


@serve.ingress()
class LlamaIngress(HandleApi, AdapterCalls):
    """One replica: a service over the ranks of this replica's own placement group."""

    async def __init__(self, args: ServerArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        """Raises LlamaError if the files show that a start cannot succeed; Serve then reports the deployment as failed."""
        keep_replica_on_loopback()
        log_like_serve(args.log_format)
        self._keys, self.logs_prompts = keys_of(args), args.log_prompts
        self.metrics = Metrics(model_name=args.model_id)
        service = LlamaService(
            args,
            pool_for(args),
            on_step=self.metrics.on_step,
            on_failure=self.metrics.on_failure,
            on_compute_ms=self.metrics.on_compute_ms,
        )
        self.service = self._own = OwnEngine(service, args, self.metrics.on_end)
        self.metrics.watch(self.service)
        cluster = RayCluster()
        self.tracing = open_tracing(service, args.model_id, cluster.replica)
        self.adapters = LoadedAdapters(service, cluster, self._own.tell_adapters)
        if args.lora_root:
            await self.adapters.start()
        self._starting = asyncio.create_task(self._own.start())
        self._starting.add_done_callback(self._started)
        try:
            # Serve sends requests to a replica from here on. If another replica serves, this one waits until it is ready.
            limit = None if await _another_replica_runs() else args.answer_after_s
            # Build it while the ranks start: Serve needs it only after this returns.
            self._http_app = http_app_of(args, self.service, self.metrics, self._keys, self.tracing, cluster, FRONT)
            await asyncio.wait_for(asyncio.shield(self._starting), limit)
        except TimeoutError:
            log.info("still loading after %.0f s: answering 503 until the ranks are ready", args.answer_after_s)
        except BaseException:
            self._starting.cancel()
            await self._own.stop()
            raise

    def _started(self, starting: asyncio.Task[None]) -> None:
        if starting.cancelled() or starting.exception() is not None:  # the service has logged it
            return
        if self.tracing is not None:
            self.tracing.ranks_started()
        collect_garbage_rarely()
        if is_behind_python_proxy():
            log.warning(SLOWER)
        if os.environ.get("LLAMA_BANNER", "1") != "0":
            print(banner(self._describe(), *http_address()), flush=True)

    def __serve_build_asgi_app__(self) -> Any:
        return self._http_app

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change limits and sampling defaults while requests run. Raises ConfigError for other arguments."""
        self._own.reconfigure(user_config)

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self.service.live():
            raise RuntimeError(self.service.readiness().detail or "no step completes")

    async def __del__(self) -> None:
        own = getattr(self, "_own", None)
        if own is not None:
            await own.drain()
            self._starting.cancel()
            await own.stop()
            if self.tracing is not None:
                await self.tracing.close()
            for handler in logging.getLogger("llama").handlers:
                handler.flush()

    async def describe(self) -> dict[str, Any]:
        """The answer of GET /props, and whether HTTP needs API keys."""
        return self._describe()

    def _describe(self) -> dict[str, Any]:
        return {**asdict(self.service.describe()), "api_keys": self._keys.are_required}


async def _another_replica_runs() -> bool:
    """Whether another replica of this deployment serves, according to Serve's controller."""
    context = serve.get_replica_context()
    try:
        status = await in_passing_thread(serve.status)
        states = status.applications[context.app_name].deployments[context.deployment].replica_states
    except Exception as error:  # the start can continue without it
        log.warning("the state of the other replicas is unknown: %s", type(error).__name__)
        return False
    return any(state == "RUNNING" and count > 0 for state, count in states.items())
