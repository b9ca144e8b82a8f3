"""The life of a front, which finds engines by itself. Knows nothing of Ray.

An engine invites the fronts when it is ready; a front asks the engines when it starts, and every few seconds, for those that
it has missed.
"""

import asyncio
import logging
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from typing import Any, Final

from deployments.api_keys import ApiKeys
from deployments.args import IngressArgs, resolve
from deployments.engine.callers import Callers
from deployments.engine.interface import Models
from deployments.fleet.cluster import ENGINE, FRONT, Cluster
from deployments.fleet.fleet import Fleet
from deployments.fleet.loaded_adapters import AdapterLoader
from deployments.http.app import HttpApp, build_http_app
from deployments.http.limits import HttpLimits
from deployments.http.request_body import BodyLimits
from deployments.http.resume.kept_streams import KeepLimits
from deployments.links.invitation import Invitation
from deployments.observe.metrics import Metrics
from deployments.observe.tracing import Tracing, open_tracing

log = logging.getLogger(__name__)

MIN_SEARCH_S: Final = 1.0
MAX_SEARCH_S: Final = 10  # between searches; at first they are more frequent, because invitations may miss a new front
FIRST_SEARCH_S: Final = 20.0  # for the engines that run; Serve limits a health check to 30 s
RECONFIGURABLE: Final = frozenset({"hold_timeout_s", "drain_timeout_s"})


def keys_of(args: IngressArgs) -> ApiKeys:
    return ApiKeys(args.api_key_digests, resolve(args.api_key_file) if args.api_key_file else None)


def http_app_of(
    args: IngressArgs,
    engine: Models,
    metrics: Metrics,
    keys: ApiKeys,
    tracing: Tracing | None,
    cluster: Cluster,
    engines: str,
) -> HttpApp:
    """engines: the deployment that has them."""
    body, keep = BodyLimits(args.max_body_bytes), KeepLimits(args.resume_window_s, args.resume_max_bytes)
    return build_http_app(
        engine,
        metrics,
        HttpLimits(body, keep=keep, request_timeout_s=args.request_timeout_s),
        keys=keys,
        admin_keys=ApiKeys(args.admin_key_digests),
        loader=AdapterLoader(engine, cluster, engines) if args.admin_key_digests else None,
        allowed_hosts=[*args.allowed_hosts, cluster.http_host],
        cors_origins=args.cors_origins,
        sends_request_id=False,
        tracing=tracing,
        log_prompts=args.log_prompts,
        ask_others=partial(cluster.call_all, FRONT, "stored_answers"),
    )


class FrontProcess:
    """One front. It takes requests, owns their streams, and has engines of other processes compute their tokens."""

    def __init__(self, args: IngressArgs, cluster: Cluster, metrics: Metrics) -> None:
        """Searches for engines from now on."""
        self._args, self._cluster = args, cluster
        salt = int.from_bytes(cluster.replica.encode()[:7], "big")  # fits 64 bits with a sign
        self.fleet = Fleet(
            cluster.node,
            Callers(args, salt),
            args.hold_timeout_s,
            args.drain_timeout_s,
            metrics.on_step,
            metrics.on_end,
            args.routing,
            cluster.invite,
        )
        metrics.watch(self.fleet)
        self.metrics, self.keys = metrics, keys_of(args)
        self.tracing = open_tracing(self.fleet, "llama", cluster.replica)
        self._http_app = http_app_of(args, self.fleet, metrics, self.keys, self.tracing, cluster, ENGINE)
        self._searching = asyncio.get_running_loop().create_task(self._search())

    async def meet(self, invitation: Invitation) -> str:
        """An engine is ready. Returns why it is refused; an empty text if it is not."""
        return await self.fleet.meet(invitation)

    async def check_health(self) -> None:
        """Serve waits for it before a new front gets requests, which may be for the model of any engine that runs."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.fleet.searched.wait(), FIRST_SEARCH_S)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change limits while requests run. Raises ConfigError for other arguments."""
        args = self._args.changed(user_config, RECONFIGURABLE)
        self.fleet.limit(args.hold_timeout_s, args.drain_timeout_s)

    async def end(self) -> None:
        self._searching.cancel()
        await self.fleet.drain()
        await self.fleet.stop()
        if self.tracing is not None:
            await self.tracing.close()

    async def _search(self) -> None:
        """Meet every engine that runs, and drop models whose applications are removed, now and from now on."""
        for pause_s in chain(range(1, MAX_SEARCH_S), repeat(MAX_SEARCH_S)):
            applications = await self._cluster.applications()
            if self._cluster.application in applications:  # else the controller does not know all of them yet
                await self.fleet.keep(applications, await self._cluster.asleep())
            invitations = await self._cluster.call_all(ENGINE, "invitation")
            found = [self.fleet.meet(each) for each in invitations if isinstance(each, Invitation)]
            for result in await asyncio.gather(*found, return_exceptions=True):
                if isinstance(result, Exception):
                    log.error("an engine could not be met: %s", type(result).__name__)
            self.fleet.searched.set()
            await asyncio.sleep(MIN_SEARCH_S)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.fleet.unserved.wait(), pause_s)
            self.fleet.unserved.clear()
