"""Nodes of Ray without the processes that no test uses, whose starts take most of a small cluster's processor time."""

import asyncio
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import ray._private.node
from ray._private import services
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    persist_port,
)

from deployments.local.small_cluster import SETTINGS

# In place of the dashboard's agent, whose end ends the raylet: waits until the raylet, its parent, has ended.
NOOP_AGENT: Final = """
import os, time
parent = os.getppid()
while os.getppid() == parent and open(f"/proc/{parent}/comm").read().strip() == "raylet":
    time.sleep(1)
"""

REGISTERED_WITHIN_S = 150.0  # Ray allows a raylet 30 s, which a busy machine exceeds
_GET_NODE = services.get_node


def _get_registered_node(gcs_address: str, node_id: str) -> Any:
    """What GCS knows of a node that starts; RuntimeError after `REGISTERED_WITHIN_S`."""
    deadline = time.monotonic() + REGISTERED_WITHIN_S
    while True:
        try:
            return _GET_NODE(gcs_address, node_id)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """`value` in place of an attribute of a module."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


class _Node(ray._private.node.Node):
    """A node without the dashboard, its agent and the autoscaler's monitor."""

    def __init__(self, ray_params: Any, **options: Any) -> None:
        ray_params.update(no_monitor=True)
        with replaced(services, "get_node", _get_registered_node):
            super().__init__(ray_params, **options)

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        """The raylet waits for the agent's ports (-1: none)."""
        for name in (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME):
            persist_port(self.get_session_dir_path(), self.node_id, name, -1)
        start_process: Callable[..., Any] = services.start_ray_process

        def without_agent(command: list[str], *rest: Any, **settings: Any) -> Any:
            option = "--dashboard_agent_command="
            noop_agent = subprocess.list2cmdline([sys.executable, "-I", "-S", "-c", NOOP_AGENT])
            changed = [f"{option}{noop_agent}" if part.startswith(option) else part for part in command]
            assert changed != command, "Ray passes no dashboard agent to the raylet: this is another version of Ray"
            return start_process(changed, *rest, **settings)

        with replaced(services, "start_ray_process", without_agent):
            super().start_raylet(*arguments, **options)

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Do not start the dashboard, which Ray also does where it is not wanted, without its pages."""


class _SilentNode(_Node):
    """And without the log monitor, which sends the output of workers to drivers."""

    def __init__(self, ray_params: Any, **options: Any) -> None:
        ray_params.update(include_log_monitor=False)
        super().__init__(ray_params, **options)


@contextmanager
def few_processes(*, logs_to_driver: bool = False) -> Iterator[None]:
    """Clusters that are started in this context consist of such nodes, and start workers only on demand."""
    os.environ["RAY_prestart_worker_first_driver"] = "0"  # noqa: SIM112 (Ray reads this name)
    for name in ("RAY_enable_metrics_collection", "RAY_task_events_report_interval_ms"):
        os.environ[name] = SETTINGS[name]
    with replaced(ray._private.node, "Node", _Node if logs_to_driver else _SilentNode):
        yield


class MainThread:
    """Runs calls that work only in the main thread for a coroutine of another thread, whose streams go on meanwhile."""

    def __init__(self) -> None:
        self._calls: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue()

    async def run(self, call: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return await asyncio.wrap_future(future)

    def serve_until(self, done: Future[Any]) -> None:
        while not done.done():
            try:
                future, call = self._calls.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
