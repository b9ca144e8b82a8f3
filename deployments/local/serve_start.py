"""Starts Serve sooner than `serve run` does: controller, proxies and the application's imports start concurrently."""

import contextlib
import importlib
import logging
import threading
import time
from typing import Any

from deployments.local.deployment_watcher import DeploymentWatcher

_NAMESPACE = "serve"


def start_serve_early(config: dict[str, Any], watcher: DeploymentWatcher) -> None:
    """Return as soon as Serve's controller exists.

    `serve run` deploys at once to a running Serve instance, but waits until every proxy of its own instance listens.
    Meanwhile a worker imports the application.
    """
    import ray
    from pydantic import ValidationError
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME
    from ray.serve.schema import ServeDeploySchema

    try:
        schema = ServeDeploySchema.model_validate(config)
    except ValidationError:  # `serve run` reports the error
        return
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # INFO would report a Serve instance with other options
    import_module = ray.remote(num_cpus=0, max_retries=0)(_import_module)
    for application in schema.applications:
        if not application.runtime_env:
            import_module.remote(application.import_path)

    def start() -> None:
        try:
            serve.start(
                proxy_location=schema.proxy_location,
                http_options=schema.http_options.model_dump(),
                grpc_options=schema.grpc_options.model_dump(),
            )
        except RayActorError as error:
            # On a slow machine Serve may take a new proxy for dead and start another.
            if not _exists(SERVE_CONTROLLER_NAME):
                watcher.fail(f"Serve did not start: {error}")
        except Exception as error:
            watcher.fail(f"Serve did not start: {error}")

    starting = threading.Thread(target=start, daemon=True, name="serve-start")
    starting.start()
    while starting.is_alive() and not _exists(SERVE_CONTROLLER_NAME):
        time.sleep(0.01)


def _exists(actor_name: str) -> bool:
    import ray

    try:
        ray.get_actor(actor_name, namespace=_NAMESPACE)
    except ValueError:
        return False
    return True


def _import_module(import_path: str) -> None:
    """Runs in the worker that will build the application. The build reports import errors."""
    with contextlib.suppress(Exception):
        importlib.import_module(import_path.partition(":")[0])
