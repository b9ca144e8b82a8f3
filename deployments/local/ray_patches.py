"""The private names of Ray that this project changes, with one guard on Ray's version.

Ray's private names may change in any release. The guard skips all patches on an unknown Ray version: the server then
starts as plain Ray starts it, slower and with ports on every interface, and one line says so. docs/cluster.md describes
each patch.
"""

from typing import Final

import ray

READ_IN: Final = (2, 60)
# The module of `deployments.local` that has the patch, and the name of Ray.
PATCHES: Final = (
    ("small_cluster", "ray._private.node:Node"),
    ("small_cluster", "ray.serve._private.replica:add_port_to_grpc_server"),
    ("haproxy", "ray.serve._private.haproxy_templates:HAPROXY_CONFIG_TEMPLATE"),
    ("front_sockets", "ray.serve._private.http_util:uvicorn"),
    ("worker_lines", "ray._private.ray_logging:global_worker_stdstream_dispatcher"),
)


def is_supported(version: str = ray.__version__) -> bool:
    """Whether the patches were written for this Ray version."""
    return tuple(version.split(".")[:2]) == tuple(map(str, READ_IN))


def report_unsupported(version: str = ray.__version__) -> str | None:
    """One line for the user where the patches are skipped; None where they apply."""
    if is_supported(version):
        return None
    names = ", ".join(name for _, name in PATCHES)
    return (
        f"Ray {version} is not Ray {READ_IN[0]}.{READ_IN[1]}: changes of {names} are skipped. The server starts "
        "slower, and Ray's own ports listen on every interface."
    )
