"""A Ray cluster on this machine for one server: on loopback alone, without dashboard and autoscaler.

Ray binds to loopback where a node's address is 127.0.0.1. But a Ray client replaces this address, given or found
("auto"), by the machine's other address, where no Ray listens. Ray does not replace the name LOCALHOST in
capitals, and the resolver ignores case. LLAMA_DASHBOARD=1 has Ray start what it starts by default.
"""

import os
import socket
from collections.abc import Callable
from typing import Any, Final

import ray
import ray._private.node

from deployments.local import private_files, ray_patches
from llama_core.host.cgroups import usable_cpus

ADDRESS: Final = "127.0.0.1"
NAME: Final = "LOCALHOST"
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
TOO_SLOW: Final = "timed out during startup"  # in Ray's error, after 30 s that it lets nobody change


def start(namespace: str, report: Callable[[str], None]) -> None:
    """Start the cluster and connect to it, as `ray.init(address="local")` does. `report` takes a line for the user."""
    if (unsupported := ray_patches.report_unsupported()) is not None:
        report(unsupported)
    options: dict[str, Any] = {"address": "local", "namespace": namespace, "num_cpus": usable_cpus()}
    # Where Ray puts its object store, and fails without a word if it is read-only.
    if not os.access("/dev/shm", os.W_OK):
        options["_plasma_directory"] = os.environ.get(private_files.VARIABLE, "/tmp")
    if os.environ.get("LLAMA_DASHBOARD", "0") not in ("", "0") or unsupported is not None:
        ray.init(**options)
        return
    if not _is_resolved():
        report(
            f"This machine does not resolve {NAME} to {ADDRESS}, so Ray's own ports, guarded by its token, are open on every "
            "interface. A line for localhost in /etc/hosts prevents that."
        )
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    node: Any = ray._private.node
    original, node.Node = node.Node, _SmallNode
    try:
        options |= {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        try:
            ray.init(**options)
        except Exception as error:
            if TOO_SLOW not in str(error):
                raise
            report("Ray has not started within its 30 s, as on a busy machine: once more")
            ray.init(**options)
    finally:
        node.Node = original


class _SmallNode(ray._private.node.Node):
    """The node that `ray.init` makes."""

    def __init__(self, ray_params: Any, **options: Any) -> None:
        ray_params.update(no_monitor=True, dashboard_agent_listen_port=0)
        self._is_on_loopback = _is_resolved()
        if self._is_on_loopback:
            ray_params.update(node_ip_address=ADDRESS)
        try:
            super().__init__(ray_params, **options)
        except BaseException:
            self.kill_all_processes(check_alive=False, allow_graceful=False)
            raise

    def start_gcs_server(self) -> None:
        super().start_gcs_server()  # type: ignore[no-untyped-call]
        if self._is_on_loopback:
            assert self._gcs_address is not None
            self._gcs_address = f"{NAME}:{self._gcs_address.rpartition(':')[2]}"

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Do not start the dashboard, which Ray also does where it is not wanted, without its pages."""


def _is_resolved() -> bool:
    """Whether the name in capitals resolves to 127.0.0.1. It does wherever /etc/hosts has localhost."""
    try:
        found = socket.getaddrinfo(NAME, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return False
    return any(address[0] == ADDRESS for *_, address in found)


def keep_replica_on_loopback() -> None:
    """Bind the replica's gRPC port to loopback where its node is on loopback; Serve would bind it to every interface.

    To be called in a replica before Serve has opened the port.
    """
    if not ray_patches.is_supported() or ray.util.get_node_ip_address() != ADDRESS:  # type: ignore[no-untyped-call]
        return
    from ray.serve._private import replica

    module: Any = replica
    add_port = module.add_port_to_grpc_server

    def add_loopback_port(server: object, address: str) -> int:
        return int(add_port(server, address.replace("[::]:", f"{ADDRESS}:")))

    module.add_port_to_grpc_server = add_loopback_port
