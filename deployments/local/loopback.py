"""Keeps a server on one machine on loopback: Ray's processes, and the port that Serve 2.60 opens in each replica.

Ray binds to loopback where a node's address is 127.0.0.1. But a Ray client replaces this address, given or found
("auto"), by the machine's other address, where no Ray listens. Ray does not replace the name LOCALHOST in
capitals, and the resolver ignores case.
"""

import socket
from typing import Any, Final

import ray

from deployments.local import ray_patches

ADDRESS: Final = "127.0.0.1"
NAME: Final = "LOCALHOST"


def is_resolved() -> bool:
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
