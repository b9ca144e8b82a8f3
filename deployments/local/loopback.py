"""Nothing of a server on one machine listens beyond it: Ray's processes, and what Serve 2.60 opens in each replica.

Ray binds to loopback alone where a node's address is 127.0.0.1. But a client that is given this address, or finds it by itself
("auto"), puts the machine's other address in its place, and would find nothing there. It leaves the name alone if it is
written in capitals, and the resolver does not mind them.
"""

import socket
from typing import Any, Final

import ray

ADDRESS: Final = "127.0.0.1"
NAME: Final = "LOCALHOST"


def is_resolved() -> bool:
    """Whether the name, in capitals, is this machine's loopback address here. It is wherever localhost is in /etc/hosts."""
    try:
        found = socket.getaddrinfo(NAME, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return False
    return any(address[0] == ADDRESS for *_, address in found)


def keep_replica_on_loopback() -> None:
    """In a replica, before Serve has opened the port at which it takes calls from other replicas: on loopback, like all else
    of its node. Serve would listen on every interface."""
    if ray.util.get_node_ip_address() != ADDRESS:  # type: ignore[no-untyped-call]
        return
    from ray.serve._private import replica

    module: Any = replica
    add_port = module.add_port_to_grpc_server

    def add_loopback_port(server: object, address: str) -> int:
        return int(add_port(server, address.replace("[::]:", f"{ADDRESS}:")))

    module.add_port_to_grpc_server = add_loopback_port
