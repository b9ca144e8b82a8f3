"""How engines and fronts find each other: by the status of Serve's applications, and calls to all replicas of a deployment.

An engine invites the fronts when it is ready; a front asks the engines when it starts, and every few seconds, for those that
it has missed. While Serve's controller is away, connections stay as they are.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from itertools import chain, repeat
from typing import Any, Final

from ray import serve

from cluster.driver.ray_calls import in_passing_thread
from deployments.fleet.fleet import Fleet
from deployments.fleet.invitation import Invitation

log = logging.getLogger(__name__)

FRONT: Final = "LlamaIngress"
ENGINE: Final = "LlamaEngine"
MIN_SEARCH_S: Final = 1.0
MAX_SEARCH_S: Final = 10  # between searches; at first they are more frequent, because invitations may miss a new front
CALL_TIMEOUT_S: Final = 10.0


async def invite(invitation: Invitation) -> str:
    """Tell every front of this engine. Returns why a front refuses it; an empty text if none does."""
    return next(filter(None, await call_all(FRONT, "meet", invitation)), "")


async def search(fleet: Fleet) -> None:
    """Meet every engine that runs, and drop models whose applications are removed, now and from now on."""
    own = serve.get_replica_context().app_name
    for pause_s in chain(range(1, MAX_SEARCH_S), repeat(MAX_SEARCH_S)):
        applications = await _applications()
        if own in applications:  # else the controller does not know all of them yet
            await fleet.keep({name for name, found in applications.items() if found.status != "DELETING"})
        invitations = await call_all(ENGINE, "invitation")
        found = [fleet.meet(each) for each in invitations if isinstance(each, Invitation)]
        for result in await asyncio.gather(*found, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("an engine could not be met: %s", type(result).__name__)
        fleet.searched.set()
        await asyncio.sleep(MIN_SEARCH_S)
        with suppress(TimeoutError):
            await asyncio.wait_for(fleet.unserved.wait(), pause_s)
        fleet.unserved.clear()


async def call_all(deployment: str, method: str, *args: Any) -> list[Any]:
    """The results of all replicas of the deployments with this name, of those that answer."""
    applications = [name for name, found in (await _applications()).items() if _runs(found, deployment)]
    each = await asyncio.gather(*(_call(name, deployment, method, *args) for name in applications))
    return [result for results in each for result in results]


async def _applications() -> Mapping[str, Any]:
    """The status of each application of Serve by its name; none while that is unknown."""
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return (await in_passing_thread(serve.status)).applications
    except Exception as error:  # Serve's controller is away
        log.debug("the applications are unknown: %s", type(error).__name__)
        return {}


def _runs(application: Any, deployment: str) -> bool:
    found = application.deployments.get(deployment)
    return found is not None and any(found.replica_states.get(state) for state in ("RUNNING", "UPDATING"))


@cache  # a handle follows its deployment's replicas for ever
def _handle(deployment: str, application: str) -> Any:
    return serve.get_deployment_handle(deployment, application)


async def _call(application: str, deployment: str, method: str, *args: Any) -> list[Any]:
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            response: Any = _handle(deployment, application).broadcast(method, *args)
            calls = await response._fetch_replica_results_async()
    except Exception as error:  # the application is being removed, or has no replica yet
        log.debug("%s of %s: no answer to %s: %s", deployment, application, method, type(error).__name__)
        return []
    # A wait for each, because one replica that hangs must not hide the others: a front that starts asks for all engines.
    waits = [asyncio.wait_for(call.get_async(), CALL_TIMEOUT_S) for call in calls]
    results = await asyncio.gather(*waits, return_exceptions=True)
    return [result for result in results if not isinstance(result, BaseException)]
