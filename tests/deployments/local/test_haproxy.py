"""HAProxy as `llama-ray up` configures it, beside other servers on the machine."""

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from pathlib import Path

import httpx
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from benchmarks.harness.programs import free_port
from cluster.wire.process_end import ProcessIdentity, end_process, is_running
from deployments.args import ServerArgs
from deployments.local import haproxy
from deployments.openai.errors import error_object
from llama_core.errors import NotReady
from tests.support.scripted_engine import eventually

LONGEST_REQUEST_S = 86_400


def test_two_servers_on_one_machine_share_no_port_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's proxies listen with SO_REUSEPORT: on one port, two clusters would get each other's requests."""
    drawn = chain([20_001, 20_002, 20_002, 20_003, 20_001, 20_004, 20_003], count(20_005))
    monkeypatch.setattr(random, "randrange", lambda *_: next(drawn))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a = haproxy.settings(tmp_path / "a")
    own = [name for name in a if name.endswith("_PORT") or a[name].startswith(str(tmp_path))]
    assert "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT" in own and len(own) == 8
    with ExitStack() as running:
        for name in own:
            if name.endswith("_PORT"):
                running.enter_context(socket.create_server(("127.0.0.1", int(a[name])), reuse_port=True))
        b = haproxy.settings(tmp_path / "b")
    values = [settings[name] for settings in (a, b) for name in own]
    assert len(set(values)) == len(values)


def check(settings: dict[str, str], config: Path) -> None:
    """Have the wrapper edit the file and HAProxy check it."""
    checked = subprocess.run(
        [settings["RAY_SERVE_HAPROXY_BINARY_PATH"], "-c", "-f", str(config)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert checked.returncode == 0, checked.stderr


def test_the_wrapper_edits_the_configuration_once_only(tmp_path: Path) -> None:
    settings = haproxy.settings(tmp_path)
    metrics, stats = (settings[f"RAY_SERVE_HAPROXY_{name}_PORT"] for name in ("METRICS", "STATS"))
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "global\n    maxconn 100\n"
        "defaults\n    mode http\n    timeout connect 5s\n    timeout client 60s\n    timeout server 60s\n"
        f"frontend prometheus\n    bind :{metrics}\nlisten stats\n  bind *:{stats}\n  stats enable\n"
        "frontend http_frontend\n    bind *:18998\n"
    )
    for _ in range(2):  # Serve has HAProxy check the file before it starts HAProxy
        check(settings, config)
    lines = [line.strip() for line in config.read_text().splitlines()]
    assert lines.count("timeout http-request 10s") == 1
    for buffer in ("sndbuf.client", "rcvbuf.server"):
        assert lines.count(f"tune.{buffer} {256 * 2**10}") == 1
    bound = [line.removeprefix("bind ") for line in lines if line.startswith("bind")]
    assert bound == [f"127.0.0.1:{metrics}", f"127.0.0.1:{stats}", "*:18998"], "the public port stays public"


@contextmanager
def running(
    folder: Path, backend: BackendConfig | None = None
) -> Iterator[tuple["subprocess.Popen[bytes]", httpx.Client]]:
    """HAProxy with the configuration that Serve writes for one application, and a client with a connection of its own."""
    settings = haproxy.settings(folder)
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=free_port()),
        socket_path=f"{folder}/admin.sock",
        server_state_base=str(folder),
        server_state_file=f"{folder}/server-state",
        stats_port=int(settings["RAY_SERVE_HAPROXY_STATS_PORT"]),
        metrics_port=int(settings["RAY_SERVE_HAPROXY_METRICS_PORT"]),
        hard_stop_after_s=int(settings["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]),
        close_spread_time_s=int(settings["RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S"]),
    )
    backends = {} if backend is None else {backend.name: backend}
    HAProxyApi(config, backends, f"{folder}/haproxy.cfg")._generate_config_file_internal()
    check(settings, folder / "haproxy.cfg")
    url = f"http://127.0.0.1:{config.http_options.port}"
    with httpx.Client(base_url=url, timeout=20) as client, started(folder) as process:
        yield process, client


@contextmanager
def started(folder: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    command = [str(haproxy.WRAPPER), "-db", "-f", f"{folder}/haproxy.cfg", *options]
    env = os.environ | haproxy.settings(folder)
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            eventually((folder / "admin.sock").exists)
            yield process
        finally:
            process.kill()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="haproxy-") as name:
        yield Path(name)


@pytest.fixture
def backend() -> Iterator[BackendConfig]:
    """An application without replicas. Serve's own proxy accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as fallback:
        port = fallback.getsockname()[1]
        yield BackendConfig("http-llama", "/", fallback_server=ServerConfig("SERVE_PROXY_ACTOR-1", "127.0.0.1", port))


@pytest.mark.parametrize("case", ["no replica", "an ended replica", "no application"])
def test_haproxy_answers_503_at_ready_while_no_replica_serves(folder: Path, backend: BackendConfig, case: str) -> None:
    """A request that Serve's own proxy gets would wait there."""
    if case == "an ended replica":
        backend.servers = [ServerConfig("SERVE_REPLICA-1", "127.0.0.1", free_port())]
    with running(folder, None if case == "no application" else backend) as (_, client):
        answer = client.get("/ready")
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "2"
    body = answer.json()
    error = error_object(NotReady(body["detail"]))
    assert body == {"ready": False, "phase": "waiting", "detail": body["detail"]} | error


def test_haproxys_own_errors_have_openais_shape_instead_of_serves_500(folder: Path) -> None:
    with running(folder, BackendConfig("http-llama", "/")) as (_, client):
        answer = client.post("/v1/completions", json={})
    assert answer.status_code == 503 and answer.headers["Retry-After"] == "2"
    assert answer.json()["error"]["code"] == "not_ready"


def test_an_idle_connection_leaves_a_replaced_haproxy_at_once(folder: Path) -> None:
    with running(folder) as (replaced, client):
        assert client.get("/ready").status_code == 503
        with started(folder, "-sf", str(replaced.pid), "-x", f"{folder}/admin.sock"):
            eventually(lambda: replaced.poll() is not None)
            assert client.get("/ready").status_code == 503


def test_a_replaced_haproxy_lives_longer_than_the_longest_request(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="request_timeout_s"):
        ServerArgs(request_timeout_s=LONGEST_REQUEST_S + 1)
    ServerArgs(request_timeout_s=LONGEST_REQUEST_S)
    settings = haproxy.settings(tmp_path)
    assert float(settings["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > LONGEST_REQUEST_S
    # Serve's default would be as long as the hard stop, for requests of connections that stay open meanwhile.
    assert float(settings["RAY_SERVE_PORT_QUARANTINE_S"]) < 600


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.argv[1], "-db", "-f", sys.argv[2]])
print(child.pid, flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux has setpriv, and is not installed")
def test_haproxy_ends_with_its_parent(tmp_path: Path) -> None:
    file, listener = tmp_path / "haproxy.cfg", tmp_path / "listener.sock"
    times = "".join(f"  timeout {name} 1s\n" for name in ("client", "server", "connect"))
    file.write_text(f"defaults\n  mode http\n{times}listen a\n  bind unix@{listener}\n")
    env = os.environ | haproxy.settings(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(haproxy.WRAPPER), str(file)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        child = ProcessIdentity.of(int(parent.stdout.readline()))
        eventually(listener.exists)
        assert is_running(child)
    try:
        eventually(lambda: not is_running(child))
    finally:
        end_process(child, patience_s=0, timeout_s=120)
