"""How engines and fronts find each other: by the status of Serve's applications, and calls to all replicas of a deployment.

While Serve's controller is away, connections stay as they are.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Set
from functools import cache
from typing import Any, Final, TypeVar

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.experimental import internal_kv

from cluster.driver.ray_calls import in_passing_thread
from deployments.fleet.cluster import ENGINE, Entry, Sleeping
from llama_core.errors import NotReady

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_TIMEOUT_S: Final = 10.0
_ADAPTERS: Final = b"llama-ray-adapters"  # namespace of Ray's key-value store
_RELEASE: Final = "RELEASE"  # the variable with which an update under the same path begins


class RayCluster:
    """Implements `Cluster` for the replica of a Serve deployment.

    Ray's key-value store has the adapters: they survive engines, fronts and, where the head's state is in Redis, the head."""

    def __init__(self) -> None:
        context = serve.get_replica_context()
        self.application, self.replica = context.app_name, context.replica_id.unique_id
        self.node: str = ray.get_runtime_context().get_node_id()
        self.host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.http_host, _ = http_address()

    async def applications(self) -> Set[str]:
        return {name for name, found in (await _applications()).items() if found.status != "DELETING"}

    async def asleep(self) -> Mapping[str, Sleeping] | None:
        applications = await _applications()
        idle = [
            name for name, found in applications.items() if ENGINE in found.deployments and not _runs(found, ENGINE)
        ]
        try:
            found = [
                await in_passing_thread(_sleeping, name) for name in idle if applications[name].status != "DELETING"
            ]
        except Exception as error:  # the controller is away, or has just removed one
            log.debug("which models sleep is unknown: %s", type(error).__name__)
            return None
        return dict(each for each in found if each is not None) if applications else None

    async def invite(self, application: str) -> Any:
        return await _handle(ENGINE, application).invitation.remote()

    async def call_all(self, deployment: str, method: str, *args: Any) -> list[Any]:
        applications = [name for name, found in (await _applications()).items() if _runs(found, deployment)]
        each = await asyncio.gather(*(_call(name, deployment, method, *args) for name in applications))
        return [result for results in each for result in results]

    async def deployed_args(self) -> dict[str, Any] | None:
        return await in_passing_thread(_deployed_args, self.application)

    async def adapters(self, model: str) -> Mapping[str, Entry]:
        return await _in_store(_adapters, model)

    async def put_adapter(self, model: str, name: str, entry: Entry, *, replaces: bool) -> bool:
        return await _in_store(_put_adapter, model, name, entry, replaces)

    async def remove_adapter(self, model: str, name: str) -> None:
        await _in_store(lambda: internal_kv._internal_kv_del(_key(model, name), namespace=_ADAPTERS))


def http_address() -> tuple[str, int]:
    """Host and port of Serve's HTTP proxies, from a private interface of Serve's; its defaults if that fails."""
    try:
        controller = serve.context._get_global_client()
        assert controller is not None
        return controller.http_config.host or "127.0.0.1", controller.http_config.port
    except Exception:
        return "127.0.0.1", 8000


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


def _sleeping(name: str) -> tuple[str, Sleeping] | None:
    """The model of an application that may have no engines; None for others. By a private interface of Serve's: the arguments
    of an application of `serve.run` are in no status."""
    client: Any = serve.context._get_global_client()
    info, _ = client.get_deployment_info(ENGINE, name)
    scaling = info.deployment_config.autoscaling_config
    if scaling is None or scaling.min_replicas:
        return None
    args = info.replica_config.init_args[0]
    return args.model_id, Sleeping(name, {*args.lora_adapters, *_adapters(args.model_id)})


def _deployed_args(name: str) -> dict[str, Any] | None:
    """A private interface of Serve's: the public one is the dashboard's, which a cluster may lack."""
    client: Any = serve.context._get_global_client()
    application = client.get_serve_details()["applications"].get(name)
    if application is None or application["status"] == "DELETING" or not application.get("deployed_app_config"):
        return None
    config: dict[str, Any] = application["deployed_app_config"]
    given: dict[str, Any] = config.get("runtime_env") or {}
    variables = {name: value for name, value in given.get("env_vars", {}).items() if name != _RELEASE}
    is_same = given.keys() <= {"env_vars"} and all(os.environ.get(name) == variables[name] for name in variables)
    return config["args"] if is_same else None


# The store. These block.


async def _in_store(function: Callable[..., T], *arguments: object) -> T:
    try:
        return await in_passing_thread(function, *arguments)
    except RayError:
        raise NotReady("Ray's control service does not answer") from None


def _key(model: str, name: str) -> bytes:
    return f"{model}\0{name}".encode()


def _adapters(model: str) -> Mapping[str, Entry]:
    found = {}
    for key in internal_kv._internal_kv_list(_key(model, ""), namespace=_ADAPTERS):
        if value := internal_kv._internal_kv_get(key, namespace=_ADAPTERS):  # else another one has just removed it
            found[key.partition(b"\0")[2].decode()] = msgspec.json.decode(value, type=Entry)
    return found


def _put_adapter(model: str, name: str, entry: Entry, replaces: bool) -> bool:
    value = msgspec.json.encode(entry)
    exists = internal_kv._internal_kv_put(_key(model, name), value, overwrite=replaces, namespace=_ADAPTERS)
    return replaces or not exists
