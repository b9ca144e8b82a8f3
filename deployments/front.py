"""The front: the ingress deployment of an application that `build_ingress` makes.

It takes requests by HTTP and handle, owns their streams, and has engines of other applications compute their tokens.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

import ray
from ray import serve

from deployments.args import IngressArgs
from deployments.engine.callers import Callers
from deployments.fleet import directory
from deployments.fleet.fleet import Fleet
from deployments.fleet.invitation import Invitation
from deployments.handle_api import HandleApi
from deployments.ingress import collect_garbage_rarely, http_app_of, keys_of
from deployments.local.small_cluster import keep_replica_on_loopback
from deployments.observe.metrics import Metrics
from deployments.observe.replica_log import log_like_serve
from deployments.observe.tracing import open_tracing

RECONFIGURABLE: Final = frozenset({"hold_timeout_s", "drain_timeout_s"})
SEARCH_S: Final = 20.0  # for the engines that run; Serve limits a health check to 30 s


@serve.ingress()
class LlamaFront(HandleApi):
    """One front. Its deployment is called LlamaIngress."""

    def __init__(self, args: IngressArgs) -> None:
        keep_replica_on_loopback()
        log_like_serve(args.log_format)
        self._args = args
        self._keys, self.logs_prompts = keys_of(args), args.log_prompts
        self.metrics = Metrics()
        context = serve.get_replica_context()
        salt = int.from_bytes(context.replica_id.unique_id.encode()[:7], "big")  # fits 64 bits with a sign
        self.fleet = self.service = Fleet(
            ray.get_runtime_context().get_node_id(),
            Callers(args, salt),
            args.hold_timeout_s,
            args.drain_timeout_s,
            self.metrics.on_step,
            self.metrics.on_end,
        )
        self.metrics.watch(self.fleet)
        self.tracing = open_tracing(self.fleet, "llama", context.replica_id.unique_id)
        self._http_app = http_app_of(args, self.fleet, self.metrics, self._keys, self.tracing, directory.ENGINE)
        self._searching = asyncio.get_running_loop().create_task(directory.search(self.fleet))
        collect_garbage_rarely()

    async def meet(self, invitation: Invitation) -> str:
        """An engine is ready. Returns why it is refused; an empty text if it is not."""
        return await self.fleet.meet(invitation)

    async def check_health(self) -> None:
        """Serve waits for it before a new front gets requests, which may be for the model of any engine that runs."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.fleet.searched.wait(), SEARCH_S)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change limits while requests run. Raises ConfigError for other arguments."""
        args = self._args.changed(user_config, RECONFIGURABLE)
        self.fleet.limit(args.hold_timeout_s, args.drain_timeout_s)

    def __serve_build_asgi_app__(self) -> Any:
        return self._http_app

    async def __del__(self) -> None:
        if (fleet := getattr(self, "fleet", None)) is not None:
            self._searching.cancel()
            await fleet.drain()
            await fleet.stop()
            if self.tracing is not None:
                await self.tracing.close()
            for handler in logging.getLogger("llama").handlers:
                handler.flush()

    async def describe(self) -> dict[str, Any]:
        """The answer of GET /props, and whether HTTP needs API keys."""
        return {**asdict(self.fleet.describe()), "api_keys": self._keys.are_required}
