"""Builds the Serve applications: `build_app` for one model in one process for HTTP and engine; `build_ingress` and
`build_engine` for fronts and engines; `app` for `serve build`."""

import glob
import logging
import os
from typing import Any, NamedTuple

import ray
from ray import serve
from ray.serve import Application

from cluster.driver.placement import (
    REPLICA_BUNDLE,
    fair_cpus_per_rank,
    group_bundles,
    resolve_device,
    shortage,
    surge_percent,
)
from deployments.args import Args, EngineArgs, IngressArgs, ServerArgs
from deployments.local.serve_run import builds_before_ray_starts, replica_variables, set_cluster_variables
from deployments.replicas.engine import LlamaEngine
from deployments.replicas.front import LlamaFront
from deployments.replicas.ingress import LlamaIngress
from llama_core.log_lines import LOG_FORMAT_VARIABLE, LogFormat

log = logging.getLogger(__name__)

HEALTH_CHECK_PERIOD_S = 2.0  # Serve replaces a replica after three failed checks
HEALTH_CHECK_TIMEOUT_S = 30.0
# Serve must pass on more requests than the server queues, so that the server refuses the excess, with OpenAI's error body. The
# spare ones are for health checks and slow senders: a request over the limit waits in Serve. HAProxy opens no more connections.
SPARE_ONGOING_REQUESTS = 4096
FRONT_ONGOING_REQUESTS = 65_536  # engines, which refuse the excess, may come at any time


def build_app(args: ServerArgs) -> Application:
    """A `LlamaIngress` in a placement group with one bundle for the replica and one for each rank.

    Raises CheckpointError if the number of ranks depends on a checkpoint that does not exist, FetchError if a remote model
    cannot be had.
    """
    args = args.pinned()
    placed = _place(args, LlamaIngress.__name__)
    max_ongoing = args.max_batch_size + args.max_queue + SPARE_ONGOING_REQUESTS
    made = args.model_copy(update=placed.resolved)
    return _application(LlamaIngress, LlamaIngress.__name__, made, placed.options, max_ongoing)


def build_engine(args: EngineArgs) -> Application:
    """A `LlamaEngine` for fronts, in a placement group as of `build_app`. Raises what that raises."""
    args = args.pinned()
    placed = _place(args, LlamaEngine.__name__)
    made = args.model_copy(update=placed.resolved)
    return _application(LlamaEngine, LlamaEngine.__name__, made, placed.options, FRONT_ONGOING_REQUESTS)


def build_ingress(args: IngressArgs) -> Application:
    """A `LlamaIngress` that serves the models of all applications made by `build_engine`. It needs no checkpoint."""
    if not ray.is_initialized() and builds_before_ray_starts():
        set_cluster_variables()
    options = {"ray_actor_options": {"num_cpus": 0, **_runtime_env(args.log_format)}}  # ranks take a node's whole CPUs
    return _application(LlamaFront, LlamaIngress.__name__, args, options, FRONT_ONGOING_REQUESTS)


class _Placed(NamedTuple):
    """options: of the deployment. resolved: arguments that the cluster has decided."""

    options: dict[str, Any]
    resolved: dict[str, Any]


def _place(args: EngineArgs, name: str) -> _Placed:
    """Where a deployment with ranks runs. Warns where the cluster has no room for it."""
    if not ray.is_initialized() and builds_before_ray_starts():
        set_cluster_variables()
    nodes = _node_resources()
    device = resolve_device(args.device, nodes)
    num_ranks = args.num_ranks()
    strategy = args.placement_strategy or "PACK"
    cpus_per_rank = args.cpus_per_rank or fair_cpus_per_rank(device, num_ranks, nodes, strategy)
    if args.cpus_per_rank is None and device == "cpu" and not ray.is_initialized():
        log.warning(
            "the cluster is unknown until Serve connects, so each rank gets one CPU: set cpus_per_rank=N for more"
        )
    bundles = group_bundles(num_ranks, device, cpus_per_rank=cpus_per_rank)
    lacking = shortage(bundles, nodes, strategy) if ray.is_initialized() else None
    if lacking is not None:
        log.warning("one replica of %s %s: it waits until there is room", args.model_id, lacking)
    options = {
        "ray_actor_options": {"num_cpus": bundles[REPLICA_BUNDLE]["CPU"], **_runtime_env(args.log_format)},
        "placement_group_bundles": bundles,
        "placement_group_strategy": strategy,
        "max_surge_percent": _surge_percent(bundles, name),
    }
    return _Placed(options, {"device": device, "model_parallel_size": num_ranks})


def _application(
    replica: type, name: str, args: Args, options: dict[str, Any], max_ongoing_requests: int
) -> Application:
    """name, options: of the deployment. replica: its class, which takes `args`."""
    deployment = serve.deployment(
        name=name,
        max_ongoing_requests=max_ongoing_requests,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=1.0,
        graceful_shutdown_timeout_s=args.drain_timeout_s + 10.0,
        max_constructor_retry_count=2,
        # The request log replaces Serve's line for each request, which costs time even at a level that drops it.
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        **options,
    )(replica)
    return deployment.bind(args)


def _runtime_env(log_format: LogFormat) -> dict[str, dict[str, dict[str, str]]]:
    """The variables that a replica's process would not inherit, as an option of its actor. Its ranks inherit them."""
    variables = replica_variables()
    if log_format != os.environ.get(LOG_FORMAT_VARIABLE, "text"):
        variables[LOG_FORMAT_VARIABLE] = log_format
    return {"runtime_env": {"env_vars": variables}} if variables else {}


def _surge_percent(bundles: list[dict[str, float]], name: str) -> int:
    """New replicas that an update starts before it ends old ones, which keep serving if the new ones fail; in percent."""
    if not ray.is_initialized():
        return 0
    running = [
        list(group["bundles"].values())
        for group in ray.util.placement_group_table().values()
        if group["state"] == "CREATED" and f"#{name}#" in group["name"]  # as Serve names a replica's group
    ]
    return surge_percent(bundles, running, ray.available_resources())  # type: ignore[no-untyped-call]


def _node_resources() -> list[dict[str, float]]:
    """Total resources of each living node. Without a connected cluster, as when `serve run module:build_app` builds: only
    this machine's GPUs, which `device: auto` needs."""
    if not ray.is_initialized():
        return [{"GPU": float(gpus)}] if (gpus := len(glob.glob("/dev/nvidia[0-9]*"))) else []
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def __getattr__(name: str) -> Any:
    # Made on first use, because importing `build_app` must not need the default checkpoint.
    if name == "app":
        return build_app(ServerArgs())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
