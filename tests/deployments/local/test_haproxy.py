"""HAProxy as `llama-ray up` configures it, beside other servers on the machine."""

import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyManager, ServerConfig
from ray.serve.config import HTTPOptions

from benchmarks.harness.programs import free_port
from cluster.wire.process_end import ProcessIdentity, end_process, is_running
from deployments.args import ServerArgs
from deployments.local import haproxy, up
from deployments.local.serve_run import set_cluster_variables
from deployments.openai.errors import error_object
from llama_core.errors import NotReady
from tests.deployments.local.haproxy import check, running, started, stub
from tests.support.programs import REPOSITORY
from tests.support.scripted_engine import assert_error, eventually

LONGEST_REQUEST_S = 86_400


def test_two_servers_on_one_machine_share_no_port_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's proxies listen with SO_REUSEPORT: on one port, two clusters would get each other's requests."""
    drawn = chain([20_001, 20_002, 20_002, 20_003, 20_001, 20_004, 20_003], count(20_005))
    monkeypatch.setattr(random, "randrange", lambda *_: next(drawn))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a = haproxy.settings(tmp_path / "a")
    own = [name for name in a if name.endswith("_PORT") or a[name].startswith(str(tmp_path))]
    assert "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT" in own and len(own) == 9
    with ExitStack() as running:
        for name in own:
            if name.endswith("_PORT"):
                running.enter_context(socket.create_server(("127.0.0.1", int(a[name])), reuse_port=True))
        b = haproxy.settings(tmp_path / "b")
    values = [settings[name] for settings in (a, b) for name in own]
    assert len(set(values)) == len(values)


def test_haproxys_sockets_have_names_that_it_can_bind_whatever_the_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Serve puts a folder named by the node's id, 56 digits, before the name of the socket; HAProxy its process id after it."""
    long = tmp_path / "a folder of a batch system, with spaces"
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made: dict[str, Any] = {}
    set_cluster_variables(made)
    folder, name = os.path.split(made["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    bound = Path(folder, "0" * 56, f"{name}{'x' * len('.4194304.tmp')}")
    bound.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bound))
    assert " " not in folder
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda **options: made.update(options) or 1 / 0)
    monkeypatch.setattr(up, "examine", lambda *_, **__: ())
    monkeypatch.setattr(up, "keep_files_private", lambda: None)
    with pytest.raises(ZeroDivisionError):
        up.serve(str(REPOSITORY / "serve_config.yaml"), [f"http_options.port={free_port()}"])
    assert made["dir"] == Path(folder).parent, "as `llama-ray up`"


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


@pytest.mark.parametrize("case", ["no replica", "an ended replica", "no application", "no fallback"])
def test_haproxy_answers_503_in_openais_shape_while_no_replica_serves(
    folder: Path, backend: BackendConfig, case: str
) -> None:
    """A request that Serve's own proxy gets would wait there. A joining node's port is open before Serve's controller has told
    it the routes."""
    if case == "an ended replica":
        backend.servers = [ServerConfig("SERVE_REPLICA-1", "127.0.0.1", free_port())]
    found = {"no application": None, "no fallback": BackendConfig("http-llama", "/")}.get(case, backend)
    with running(folder, found) as (_, client):
        answers = [client.get("/ready")]
        if found is not backend:
            answers += [client.post("/v1/completions", json={}), client.get("/")]
    for answer in answers:
        assert answer.status_code == 503 and answer.headers["Retry-After"] == "2"
        assert answer.json()["error"]["code"] == "not_ready"
    body = answers[0].json()
    error = error_object(NotReady(body["detail"]))
    assert body == {"ready": False, "phase": "waiting", "detail": body["detail"]} | error


def test_a_path_of_no_application_is_404_in_openais_shape(folder: Path) -> None:
    with running(folder, BackendConfig("http-llama", "/llama")) as (_, client):
        assert_error(client.get("/v1/models"), 404, "not_found")


@pytest.mark.parametrize("path", ["/-/routes", "/-/healthz", "/%2d/routes", "/-%2Fhealthz"])
def test_serves_own_routes_answer_no_forwarded_request(folder: Path, path: str) -> None:
    port = free_port()
    backend = BackendConfig("http-llama", "/", servers=[ServerConfig("SERVE_REPLICA-1", "127.0.0.2", port)])
    with stub("127.0.0.2", str(port)), running(folder, backend, is_head=True, has_received_routes=True) as (_, client):
        assert client.get(path).status_code == 200, "KubeRay's probes"
        assert_error(client.get(path, headers={"X-Forwarded-For": "192.0.2.1"}), 404, "not_found")


def test_serves_own_routes_answer_no_other_machine(folder: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        own = probe.getsockname()[0]
    if own.startswith(("127.", "0.")):
        pytest.skip("this machine has no address beside loopback")
    with running(folder, http_options=HTTPOptions(host="0.0.0.0", port=free_port())) as (_, client):
        answer = client.get(f"http://{own}:{client.base_url.port}/-/routes")
        assert_error(answer, 404, "not_found")


def test_a_head_of_60_kib_passes(folder: Path) -> None:
    port = free_port()
    backend = BackendConfig("http-llama", "/", servers=[ServerConfig("SERVE_REPLICA-1", "127.0.0.2", port)])
    with stub("127.0.0.2", str(port)), running(folder, backend) as (_, client):
        assert client.get("/v1/models", headers={"X-Long": "a" * 60 * 2**10}).text == "/v1/models"


def test_with_few_open_files_haproxy_takes_fewer_connections(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 connections need 10,266 open files. With Serve's configuration HAProxy ends with an alert where it has fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(subprocess, "Popen", partial(subprocess.Popen, preexec_fn=lower_file_limit))
    with running(folder) as (_, client):
        assert client.get("/ready").status_code == 503
    assert (soft, hard) == resource.getrlimit(resource.RLIMIT_NOFILE)


def lower_file_limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


REPLICA = "SERVE_REPLICA::llama#LlamaIngress#a1b2c3d4"


def test_a_replica_of_this_node_is_reached_by_its_socket_and_never_by_its_port(folder: Path) -> None:
    """Another user binds the port of a replica that has died, and waits for requests with keys."""
    manager: Any = HAProxyManager
    name = manager.__ray_metadata__.modified_class.get_safe_name(REPLICA)
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(2)
        port = other.getsockname()[1]
        backend = BackendConfig("http-llama", "/", servers=[ServerConfig(name, "127.0.0.1", port)])
        backend.fallback_server = ServerConfig(f"SERVE_PROXY_ACTOR-fallback-{'0' * 56}", "127.0.0.1", port)
        (folder / "fronts").mkdir()
        with stub(f"{folder}/fronts/a1b2c3d4") as replica, running(folder, backend) as (_, client):
            assert client.get("/v1/models").text == "/v1/models"
            replica.kill()
            replica.wait()
            with suppress(httpx.RemoteProtocolError):  # of the connection with the replica that HAProxy has kept
                client.get("/v1/models")
            assert client.get("/v1/models").status_code == 503
        with pytest.raises(TimeoutError):
            other.accept()


# Of a replica whose checks fail, and of a node that vanishes


@pytest.mark.parametrize("path", ["/whole?4", "/stream?4"])
def test_connections_of_a_replica_whose_checks_fail_go_on(folder: Path, path: str) -> None:
    """A replica that drains fails its checks. Here it stands still meanwhile; its checks fall after 2.3 to 3.3 s."""
    port = free_port()
    backend = BackendConfig("http-llama", "/", servers=[ServerConfig("SERVE_REPLICA-1", "127.0.0.2", port)])
    with (
        stub("127.0.0.2", str(port)) as replica,
        running(folder, backend, health_check_inter="1s") as (_, client),
    ):
        for after_s, signum in ((1, signal.SIGSTOP), (6, signal.SIGCONT)):
            threading.Timer(after_s, replica.send_signal, [signum]).start()
        assert client.get(path).text == ("/whole" if path.startswith("/whole") else "hi" * 40)


@pytest.mark.full
def test_connections_of_a_node_that_vanishes_end(tmp_path: Path) -> None:
    """Without FIN, also those of a HAProxy that a reload has replaced, which checks nothing."""
    command = [sys.executable, "-m", "tests.programs.vanished_node", "--seconds", "3"]
    probe = subprocess.run(["unshare", "-rn", "ip", "link"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no network namespaces here: {probe.stderr.decode()}")
    done = subprocess.run(["unshare", "-rn", *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["whole"] == "200 /whole"
    assert found["stream_s"] < 32 and found["replaced_s"] < 32


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
