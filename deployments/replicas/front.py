"""The front: the ingress deployment of an application that `build_ingress` makes.

It takes requests by HTTP and handle, owns their streams, and has engines of other applications compute their tokens.
"""

import logging
from dataclasses import asdict
from typing import Any

from ray import serve

from deployments.args import IngressArgs
from deployments.fleet.directory import RayCluster
from deployments.handle.api import HandleApi
from deployments.local.small_cluster import keep_replica_on_loopback
from deployments.observe.metrics import Metrics
from deployments.observe.replica_log import log_like_serve
from deployments.replicas.common import collect_garbage_rarely
from deployments.replicas.front_process import FrontProcess


@serve.ingress()
class LlamaFront(FrontProcess, HandleApi):
    """One replica. Its deployment is called LlamaIngress."""

    def __init__(self, args: IngressArgs) -> None:
        keep_replica_on_loopback()
        log_like_serve(args.log_format)
        super().__init__(args, RayCluster(), Metrics())
        self.service, self.logs_prompts = self.fleet, args.log_prompts
        collect_garbage_rarely()

    def __serve_build_asgi_app__(self) -> Any:
        return self._http_app

    async def __del__(self) -> None:
        if hasattr(self, "fleet"):
            await self.end()
            for handler in logging.getLogger("llama").handlers:
                handler.flush()

    async def describe(self) -> dict[str, Any]:
        """The answer of GET /props, and whether HTTP needs API keys."""
        return {**asdict(self.fleet.describe()), "api_keys": self.keys.are_required}
