"""HAProxy as `llama-ray up` configures it, beside other servers on the machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.wire.process_end import ProcessIdentity, end_process, is_running
from deployments.http.errors import error_object
from deployments.local import haproxy, ray_patches
from llama_core.errors import NotReady
from tests.support.scripted_engine import eventually

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_two_servers_on_one_machine_share_no_port_and_no_file(tmp_path: Path) -> None:
    """Serve's proxies listen with SO_REUSEPORT: on one port, two clusters would get each other's requests."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = haproxy.settings(tmp_path / "a"), haproxy.settings(tmp_path / "b")
    own = [name for name in a if name.endswith("_PORT") or a[name].startswith(str(tmp_path))]
    assert "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT" in own and len(own) == 8
    values = [settings[name] for settings in (a, b) for name in own]
    assert len(set(values)) == len(values)


def test_no_port_lies_in_the_kernels_ephemeral_range(tmp_path: Path) -> None:
    first, last = map(int, EPHEMERAL.read_text().split()) if EPHEMERAL.exists() else (32768, 60999)
    if first < 30_000:
        pytest.skip(f"this kernel gives out all ports from {first}")
    settings = haproxy.settings(tmp_path)
    ports = [int(value) for name, value in settings.items() if name.endswith("_PORT")]
    assert len(ports) == 3 and not any(first <= port <= last for port in ports)


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


CONFIG = """defaults
  mode http
  timeout client 1s
  timeout server 1s
  timeout connect 1s
frontend http_frontend
    bind *:18999
    default_backend http-llama
backend http-llama
  {}server SERVE_PROXY_ACTOR-fallback 127.0.0.1:1 check backup
"""


@pytest.mark.parametrize("replica", ["", "server SERVE_REPLICA-1 127.0.0.1:2 check\n  "], ids=["no replica", "one"])
def test_haproxy_answers_503_at_ready_only_while_there_is_no_replica(tmp_path: Path, replica: str) -> None:
    settings = haproxy.settings(tmp_path)
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIG.format(replica))
    for _ in range(2):
        check(settings, file)
    rules = [line for line in file.read_text().splitlines() if "path_end /ready" in line]
    assert len(rules) == (0 if replica else 1)
    for rule in rules:
        assert "status 503" in rule and "hdr Retry-After 2" in rule
        body = json.loads(rule.split("'")[1])
        assert body == {"ready": False, "phase": "waiting", "detail": body["detail"]} | error_object(
            NotReady(body["detail"])
        )
    assert "bind *:18999" in file.read_text()


def test_without_a_variable_the_wrapper_finds_the_binary_of_the_package(tmp_path: Path) -> None:
    """On a cluster, cluster.env names the wrapper as Serve's binary."""
    python = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    env = python | {"RAY_SERVE_HAPROXY_BINARY_PATH": str(haproxy.WRAPPER)}
    done = subprocess.run([haproxy.WRAPPER, "-v"], env=env, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("HAProxy version")


def test_on_another_version_of_ray_serve_runs_haproxy_without_the_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_patches, "is_supported", lambda: False)
    assert "RAY_SERVE_HAPROXY_BINARY_PATH" not in haproxy.settings(tmp_path)


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.argv[1], "-db", "-f", sys.argv[2]])
print(child.pid, flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux has setpriv, and is not installed")
def test_haproxy_ends_with_its_parent_where_that_is_asked_for(tmp_path: Path) -> None:
    file, listener = tmp_path / "haproxy.cfg", tmp_path / "listener.sock"
    times = "".join(f"  timeout {name} 1s\n" for name in ("client", "server", "connect"))
    file.write_text(f"defaults\n  mode http\n{times}listen a\n  bind unix@{listener}\n")
    env = os.environ | haproxy.settings(tmp_path) | {"LLAMA_HAPROXY_ENDS_WITH_PARENT": "1"}
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
