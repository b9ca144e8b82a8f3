"""Every place where this project changes Ray or relies on Ray's private names, with one guard on Ray's version.

Ray's private names may change in any release. The guard skips all patches on an unknown Ray version: the server then
starts as plain Ray starts it, slower and with ports on every interface, and one line says so.
"""

import importlib
import sys
from dataclasses import dataclass
from typing import Any, Final

import ray

READ_IN: Final = (2, 60)


@dataclass(frozen=True, slots=True)
class Patch:
    """One change of Ray. `target` is "module:name" in Ray; `file` is the module of `deployments.local` that has the patch."""

    file: str
    target: str
    change: str
    reason: str

    def resolve(self) -> Any:
        """The object of Ray that the patch changes. Raises ImportError or AttributeError where Ray has no such name."""
        module, _, names = self.target.partition(":")
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
        return found


PATCHES: Final = (
    Patch(
        "small_cluster",
        "ray._private.node:Node",
        "a subclass starts neither dashboard nor autoscaler monitor, and waits for the raylet by polling every 10 ms",
        "1.5 s and 200 MB less at start",
    ),
    Patch(
        "small_cluster",
        "ray._private.services:start_ray_process",
        "the raylet's command line gets `noop_agent.py` in place of the dashboard agent",
        "the agent takes 110 MB and 15 threads, and the raylet ends without one",
    ),
    Patch(
        "small_cluster",
        "ray._private.node:Node.start_gcs_server",
        "the address of Ray's control service is LOCALHOST, in capitals",
        "Ray replaces 127.0.0.1 and localhost by the machine's other address",
    ),
    Patch(
        "loopback",
        "ray.serve._private.replica:add_port_to_grpc_server",
        "a replica's gRPC port is bound to 127.0.0.1 where its node is",
        "Serve binds it to every interface",
    ),
    Patch(
        "controller_interval",
        "ray.serve._private.controller:CONTROL_LOOP_INTERVAL_S",
        "the controller's loop interval changes from 0.1 s to 0.5 s once the server is ready",
        "one pass of the loop holds a core for 1.5 ms, which all ranks wait for",
    ),
    Patch(
        "haproxy",
        "ray.serve._private.haproxy_templates:HAPROXY_CONFIG_TEMPLATE",
        "a wrapper of the HAProxy binary edits the configuration that Serve writes",
        "time limits, loopback ports, bounded socket buffers, 503 at /ready without a replica",
    ),
    Patch(
        "worker_lines",
        "ray._private.ray_logging:global_worker_stdstream_dispatcher",
        "a handler reads the lines that Ray carries from workers to the driver",
        "the terminal shows only the lines that matter",
    ),
    Patch(
        "shutdown",
        "ray._private.worker:print_to_stdstream",
        "errors about calls to Serve's controller are dropped during a shutdown",
        "Serve kills its controller while calls to it are open, which Ray reports as failures",
    ),
)


def is_supported(version: str = ray.__version__) -> bool:
    """Whether the patches were written for this Ray version."""
    return tuple(version.split(".")[:2]) == tuple(map(str, READ_IN))


def report_unsupported(version: str = ray.__version__) -> str | None:
    """One line for the user where the patches are skipped; None where they apply."""
    if is_supported(version):
        return None
    names = ", ".join(dict.fromkeys(patch.file for patch in PATCHES))
    return (
        f"Ray {version} is not Ray {READ_IN[0]}.{READ_IN[1]}: these changes of Ray are skipped: {names}. The server starts "
        "slower, and Ray's own ports listen on every interface."
    )


if __name__ == "__main__":  # the table of docs/cluster.md
    for patch in PATCHES:
        sys.stdout.write(f"| `{patch.file}` | `{patch.target}` | {patch.change} | {patch.reason} |\n")
