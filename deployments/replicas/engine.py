"""An engine for fronts: the deployment of an application that `build_engine` makes. It has no route."""

from starlette.requests import Request
from starlette.responses import Response

from deployments.args import EngineArgs
from deployments.fleet.directory import RayCluster
from deployments.local.small_cluster import keep_replica_on_loopback
from deployments.observe.metrics import Metrics
from deployments.observe.replica_log import log_like_serve
from deployments.replicas.common import collect_garbage_rarely, pool_for
from deployments.replicas.engine_process import EngineProcess


class LlamaEngine(EngineProcess):
    """One replica, over the ranks of its own placement group."""

    async def __init__(self, args: EngineArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        """Raises LlamaError if no start can succeed; Serve then reports the deployment as failed."""
        keep_replica_on_loopback()
        log_like_serve(args.log_format)
        super().__init__(args, pool_for(args), RayCluster(), Metrics(model_name=args.model_id))
        await self.start()
        collect_garbage_rarely()

    async def __call__(self, request: Request) -> Response:
        """Serve gives the first deployment of an application a port for HTTP. Only fronts serve HTTP."""
        text = "An engine serves no HTTP: send requests to the application llama.\n"
        return Response(text, 404, {"Connection": "close"})

    async def __del__(self) -> None:
        if hasattr(self, "service"):
            await self.end()
