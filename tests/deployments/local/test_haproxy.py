"""How `make serve` has Serve run HAProxy: beside other servers of the same machine, without touching them."""

import json
import subprocess
from pathlib import Path

import pytest

from deployments.local import haproxy

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


def test_no_port_is_one_that_the_kernel_may_give_to_another_process_before_haproxy_starts(tmp_path: Path) -> None:
    first, last = map(int, EPHEMERAL.read_text().split()) if EPHEMERAL.exists() else (32768, 60999)
    if first < 30_000:
        pytest.skip(f"this kernel gives out all ports from {first}")
    settings = haproxy.settings(tmp_path)
    ports = [int(value) for name, value in settings.items() if name.endswith("_PORT")]
    assert len(ports) == 3 and not any(first <= port <= last for port in ports)


def test_the_command_mends_what_serve_writes_and_once_only(tmp_path: Path) -> None:
    settings = haproxy.settings(tmp_path)
    command = settings["RAY_SERVE_HAPROXY_BINARY_PATH"]
    metrics, stats = (settings[f"RAY_SERVE_HAPROXY_{name}_PORT"] for name in ("METRICS", "STATS"))
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        "global\n    maxconn 100\n"
        "defaults\n    mode http\n    timeout connect 5s\n    timeout client 60s\n    timeout server 60s\n"
        f"frontend prometheus\n    bind :{metrics}\nlisten stats\n  bind *:{stats}\n  stats enable\n"
        "frontend http_frontend\n    bind *:18998\n"
    )
    for _ in range(2):  # Serve has it check the file before it starts it
        checked = subprocess.run([command, "-c", "-f", str(config)], capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
    lines = [line.strip() for line in config.read_text().splitlines()]
    assert lines.count(f"timeout http-request {haproxy.HEAD_S}s") == 1
    for buffer in ("sndbuf.client", "rcvbuf.server"):
        assert lines.count(f"tune.{buffer} {haproxy.SOCKET_BUFFER_BYTES}") == 1
    bound = [line.removeprefix("bind ") for line in lines if line.startswith("bind")]
    assert bound == [f"127.0.0.1:{metrics}", f"127.0.0.1:{stats}", "*:18998"], "what is to be public stays so"


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
def test_haproxy_answers_that_nothing_is_ready_only_while_there_is_no_replica(tmp_path: Path, replica: str) -> None:
    command = haproxy.settings(tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIG.format(replica))
    for _ in range(2):  # Serve has it check the file first
        done = subprocess.run([command, "-c", "-f", str(file)], capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0, done.stderr
    rules = [line for line in file.read_text().splitlines() if "path /ready" in line]
    assert len(rules) == (0 if replica else 1)
    for rule in rules:
        assert "status 503" in rule and "hdr Retry-After 2" in rule
        body = json.loads(rule.split("'")[1])
        assert (body["ready"], body["phase"], body["error"]["code"]) == (False, "waiting", "not_ready")
    assert "bind *:18999" in file.read_text()
