"""A Ray cluster on this machine for one server, without the processes that such a server never uses.

`ray.init()` of Ray 2.60 also starts a dashboard with a process for each of its pages, and waits for it; a monitor for
the autoscaler of a cluster that cannot grow; and exporters of metrics, whose fixed port makes a second cluster on the
machine wait four seconds more. Few of these have an option, so `_SmallNode` changes what Ray's own class starts.
LLAMA_DASHBOARD=1 has Ray start all of it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import ray
import ray._private.node
from ray._private import services
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    persist_port,
)

from deployments.local import loopback, ray_patches

# Read by every process of the cluster.
SETTINGS: Final = {
    # Without dashboard and exporters, the threads that report to them are not needed.
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_start_python_gc_manager_thread": "0",  # the caller runs the collection instead
    "RAY_object_manager_rpc_threads_num": "1",  # one thread serves objects to other nodes, not one for each core
    # Idle workers end, but not at once: between two steps of a start a worker may be idle for a second.
    "RAY_num_workers_soft_limit": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "4000",
}
# Steps and answers do not use Ray's object store. By default Ray reserves three tenths of the machine's memory for it, and
# warns about a container's small /dev/shm.
OBJECT_STORE_BYTES: Final = 256 * 2**20
NOOP_AGENT: Final = Path(__file__).parent / "noop_agent.py"
_REGISTERED_WITHIN_S: Final = 30.0


def wants_dashboard() -> bool:
    return os.environ.get("LLAMA_DASHBOARD", "0") not in ("", "0")


def start(namespace: str, report: Callable[[str], None]) -> None:
    """Start the cluster and connect to it, as `ray.init(address="local")` does. `report` takes a line for the user."""
    if (unsupported := ray_patches.report_unsupported()) is not None:
        report(unsupported)
    if wants_dashboard() or unsupported is not None:
        ray.init(address="local", namespace=namespace)
        return
    if not loopback.is_resolved():
        report(
            f"This machine does not resolve {loopback.NAME} to {loopback.ADDRESS}, so Ray's own ports, guarded by its "
            "token, are open on every interface. A line for localhost in /etc/hosts prevents that."
        )
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with replaced(ray._private.node, "Node", _SmallNode):
        ray.init(address="local", namespace=namespace, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)


class NodeWithoutAgent(ray._private.node.Node):
    """A node of Ray's without the dashboard's agent, which takes 15 threads, 110 MB and 3 s of processor time to start."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        """Start the raylet with a no-op agent, because it ends when its agent ends. It also waits for the agent's ports
        (-1: none)."""
        for name in (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME):
            persist_port(self.get_session_dir_path(), self.node_id, name, -1)  # type: ignore[no-untyped-call]
        start_process: Callable[..., Any] = services.start_ray_process

        def without_agent(command: list[str], *rest: Any, **settings: Any) -> Any:
            option = "--dashboard_agent_command="
            noop_agent = subprocess.list2cmdline([sys.executable, "-I", "-S", str(NOOP_AGENT)])
            changed = [f"{option}{noop_agent}" if part.startswith(option) else part for part in command]
            assert changed != command, "Ray passes no dashboard agent to the raylet: this is another version of Ray"
            return start_process(changed, *rest, **settings)

        with replaced(services, "start_ray_process", without_agent):
            super().start_raylet(*arguments, **options)


class _SmallNode(NodeWithoutAgent):
    """The node that `ray.init` makes, on loopback alone, without dashboard, its agent, monitor and exporters."""

    def __init__(self, ray_params: Any, **options: Any) -> None:
        ray_params.update(no_monitor=True, dashboard_agent_listen_port=0)
        self._is_on_loopback = loopback.is_resolved()
        if self._is_on_loopback:
            ray_params.update(node_ip_address=loopback.ADDRESS)
        super().__init__(ray_params, **options)

    def start_head_processes(self) -> None:
        # Rotation needs threads that copy the agents' output, and there is hardly any output.
        self.max_bytes = 0
        super().start_head_processes()  # type: ignore[no-untyped-call]

    def start_gcs_server(self) -> None:
        super().start_gcs_server()  # type: ignore[no-untyped-call]
        if self._is_on_loopback:
            assert self._gcs_address is not None
            self._gcs_address = f"{loopback.NAME}:{self._gcs_address.rpartition(':')[2]}"

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Do not start the dashboard."""

    def start_ray_processes(self) -> None:
        super().start_ray_processes()  # type: ignore[no-untyped-call]
        # Ray looks for the raylet next, and if it is missing looks again only a second later.
        gcs = self.get_gcs_client()  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + _REGISTERED_WITHIN_S
        while not gcs.get_all_node_info() and time.monotonic() < deadline:
            time.sleep(0.01)


@contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """`value` in place of an attribute of a module."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
