"""Run by test_small_cluster.py as a program: the cluster of `llama-ray up`, with or without the dashboard.

Prints its observations as one line of JSON.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def children() -> list[str]:
    """Command lines of all processes that descend from this one."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it has just ended
            continue

    def is_ours(pid: int) -> bool:
        while pid and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid != 0

    return [command for pid, command in commands.items() if pid != os.getpid() and is_ours(pid)]


def run() -> dict[str, Any]:
    import ray
    import ray._private.node
    from ray._private import services

    from deployments.local import small_cluster

    before = ray._private.node.Node
    small_cluster.start("serve", print)
    try:
        context = ray.get_runtime_context()
        (node,) = ray.nodes()
        global_node = ray._private.worker._global_node
        assert global_node is not None
        address = context.gcs_address
        found = address in services.find_gcs_addresses() and services.canonicalize_bootstrap_address(address) == address
        four = ray.get(ray.remote(num_cpus=0)(lambda: 2 + 2).remote())
        return {
            "children": children(),
            "namespace": context.namespace,
            "restored": ray._private.node.Node is before,
            "object_store_bytes": node["Resources"]["object_store_memory"],
            "four": four,
            "address": address,
            "is_found_there": found,
            "settings": {name: os.environ.get(name) for name in small_cluster.SETTINGS},
            "dashboard": global_node.webui_url,
        }
    finally:
        ray.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        os.environ["RAY_TMPDIR"] = temporary  # so that no other program joins this cluster by accident
        print("SEEN " + json.dumps(run()), flush=True)
