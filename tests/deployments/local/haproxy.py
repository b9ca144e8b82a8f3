"""HAProxy with the configuration that Serve writes and the wrapper edits, without Serve."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions

from benchmarks.harness.programs import free_port
from deployments.local import haproxy
from deployments.local.serve_run import SAFE_HEADERS
from tests.support.scripted_engine import eventually

CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": SAFE_HEADERS}
# A replica, at HOST PORT or at the PATH of a socket. /whole?SECONDS answers after so long, /stream?SECONDS sends a chunk every
# 0.1 s, and every other path its name at once.
STUB = """
import http.server, socket, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        kind, _, seconds = self.path.partition("?")
        self.send_response(200) if kind == "/stream" else time.sleep(float(seconds or 0))
        if kind == "/stream":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for _ in range(int(float(seconds) * 10)):
                self.wfile.write(b"2\\r\\nhi\\r\\n")
                time.sleep(0.1)
            self.wfile.write(b"0\\r\\n\\r\\n")
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(kind)))
            self.end_headers()
            self.wfile.write(kind.encode())

    def address_string(self):
        return ""

    def log_message(self, *_):
        pass

class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    address_family = socket.AF_UNIX if len(sys.argv) == 2 else socket.AF_INET

    def server_bind(self):
        self.socket.bind(self.server_address)

    def handle_error(self, *_):  # HAProxy closes connections after its checks
        pass

Server((sys.argv[1], int(sys.argv[2])) if len(sys.argv) == 3 else sys.argv[1], Handler).serve_forever()
"""


@contextmanager
def stub(*address: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", STUB, *address]) as process:
        try:
            if len(address) == 1:
                eventually(Path(*address).is_socket)
            else:
                eventually(lambda: answers(address[0], int(address[1])))
            yield process
        finally:
            process.kill()


def answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


def check(settings: dict[str, str], config: Path) -> None:
    """Have the wrapper edit the file and HAProxy check it."""
    checked = subprocess.run(
        [settings["RAY_SERVE_HAPROXY_BINARY_PATH"], "-c", "-f", str(config)],
        env={**os.environ, **settings, **CALLBACK},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert checked.returncode == 0, checked.stderr


@contextmanager
def running(
    folder: Path, backend: BackendConfig | None = None, **options: Any
) -> Iterator[tuple["subprocess.Popen[bytes]", httpx.Client]]:
    """HAProxy with the configuration that Serve writes for one application, and a client with a connection of its own.

    options: of HAProxyConfig, in place of those here.
    """
    settings = haproxy.settings(folder)
    given: dict[str, Any] = {
        "http_options": HTTPOptions(host="127.0.0.1", port=free_port()),
        "socket_path": f"{folder}/admin.sock",
        "server_state_base": str(folder),
        "server_state_file": f"{folder}/server-state",
        "stats_port": int(settings["RAY_SERVE_HAPROXY_STATS_PORT"]),
        "metrics_port": int(settings["RAY_SERVE_HAPROXY_METRICS_PORT"]),
        "hard_stop_after_s": int(settings["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]),
        "close_spread_time_s": int(settings["RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S"]),
        "timeout_server_s": int(settings["RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S"]),
        "bufsize": int(settings["RAY_SERVE_HAPROXY_TUNE_BUFSIZE"]),
    }
    config = HAProxyConfig(**(given | options))
    backends = {} if backend is None else {backend.name: backend}
    HAProxyApi(config, backends, f"{folder}/haproxy.cfg")._generate_config_file_internal()
    check(settings, folder / "haproxy.cfg")
    url = f"http://127.0.0.1:{config.http_options.port}"
    with httpx.Client(base_url=url, timeout=20) as client, started(folder) as process:
        yield process, client


@contextmanager
def started(folder: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [str(haproxy.WRAPPER), "-db", "-f", f"{folder}/haproxy.cfg", *options]
    env = os.environ | haproxy.settings(folder) | CALLBACK
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            eventually((folder / "admin.sock").exists)
            yield process
        finally:
            process.kill()
