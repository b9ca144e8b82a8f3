"""Run by test_own_cluster.py as a program of its own: a cluster of two nodes from the commands of cluster/deploy.

`start_node.sh` starts the head and a second raylet, and `serve deploy` deploys serve_cluster.yaml. `tests/chaos` scales and
updates a cluster under streams. Both nodes have one address of the loopback interface, so HAProxy runs on the head only, and
free ports replace the files' own. Prints its observations as one line of JSON.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.harness.programs import free_port
from deployments.local.haproxy import settings
from deployments.local.process_tag import VARIABLE, end_tagged_processes, tagged_processes
from tests.support import http
from tests.support.programs import REPOSITORY, environment
from tests.support.waiting import wait_until

DEPLOY = REPOSITORY / "cluster" / "deploy"
KEY = "own-cluster-key"
LIMIT_S = 180.0
NODE_STARTS = 3
HOST = "127.0.0.2"  # of both nodes; Ray replaces 127.0.0.1 by the machine's other address
OPTIONS = f"--node-ip-address={HOST} --num-cpus=3 --object-store-memory=100000000 --block"
OPTIONS += ' --resources={"front":1} --min-worker-port=0 --max-worker-port=0 --disable-usage-stats'


class Cluster:
    """Two raylets that `start_node.sh` started, and the commands of `serve` against them."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.tag, self.port = directory, uuid.uuid4().hex, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._dashboard = free_port()
        (directory / "haproxy").mkdir(mode=0o700)
        haproxy = settings(directory / "haproxy")
        own = {name: value for name, value in haproxy.items() if name.endswith(("_PORT", "_LOC", "SOCKET_PATH"))}
        own |= {name: value for name, value in haproxy.items() if "SERVER_STATE" in name}
        self.env = environment(
            **own,
            HOME=str(directory),
            XDG_CACHE_HOME=os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
            RAY_TMPDIR=str(directory),
            PYTHONUNBUFFERED="1",  # so that the output of `ray start` is seen while it runs
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            **{VARIABLE: self.tag, "SPT_NOENV": "1"},  # no title of Ray's overwrites the tag
        )
        self.nodes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """The launcher's commands, in its order."""
        self.write_keys()
        port = free_port()
        self._node(f"--head --port={port} --dashboard-host={HOST} --dashboard-port={self._dashboard}")
        wait("the head", lambda: self.shell(f"ray health-check --address={HOST}:{port}", check=False))
        wait("the dashboard", lambda: _listens(self._dashboard))
        agent = f"--dashboard-agent-listen-port={free_port()} --dashboard-agent-grpc-port={free_port()}"
        self._node(f"--address={HOST}:{port} {agent}")

    def write_keys(self) -> None:
        (self.directory / ".llama").mkdir()
        (self.directory / ".llama" / "api_keys").write_text(f"{KEY}\n")
        self.shell("ray get-auth-token --generate")

    def _node(self, options: str, common: str = OPTIONS, prefix: Sequence[str] = ()) -> None:
        """Start a node. Like the service manager of a machine, start it again where `ray start` fails: it gives a raylet 30 s
        to register, which is not enough while other tests keep the machine busy."""
        log = self.directory / f"node-{len(self.nodes)}"
        command = [*prefix, str(DEPLOY / "start_node.sh"), *options.split(), *common.split()]
        for _ in range(NODE_STARTS):
            with log.open("wb") as output:
                node = subprocess.Popen(
                    command, env=self.env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            wait("`ray start` succeeds or fails", partial(_has_started_or_ended, node, log))
            if node.poll() is None:
                self.nodes.append(node)
                return
        raise RuntimeError(f"{command}: {log.read_text()[-2000:]}")

    def shell(self, command: str, *, check: bool = True) -> bool:
        """Run a command after sourcing cluster.env, as the launcher's `serve deploy` line does."""
        script = f". {DEPLOY}/cluster.env && {command}"
        done = subprocess.run(
            ["bash", "-c", script], env=self.env, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}")
        return done.returncode == 0

    def deploy(self) -> None:
        config = yaml.safe_load((DEPLOY / "serve_cluster.yaml").read_text())
        config |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": self.port}}
        config["applications"][1]["args"]["spare_ranks"] = False  # standby processes would cost processor time only
        path = self.directory / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        self.shell(f"serve deploy {path} --address http://{HOST}:{self._dashboard}")

    def kill_raylet(self) -> float:
        """Kill the raylet of the head, on which HAProxy runs. Seconds until no HAProxy is left."""
        commands = {pid: _command_line(pid) for pid in tagged_processes(self.tag)}
        (raylet,) = (pid for pid, line in commands.items() if "/raylet " in f"{line} "[:200] and " --head" in line)
        os.kill(raylet, signal.SIGKILL)
        return wait(
            "HAProxy ends", lambda: not any("bin/haproxy" in _command_line(pid) for pid in tagged_processes(self.tag))
        )

    def end(self) -> list[str]:
        """Ends both nodes. Returns the command lines of processes that had to be killed."""
        for node in reversed(self.nodes):
            node.send_signal(signal.SIGTERM)
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(90)
        deadline = time.monotonic() + 90  # without a GCS server, an agent of Ray's asks for it for 60 s before it ends
        while tagged_processes(self.tag) and time.monotonic() < deadline:
            time.sleep(0.2)
        left = [_command_line(pid)[:80] for pid in tagged_processes(self.tag)]
        end_tagged_processes(self.tag)
        return left


def _has_started_or_ended(node: "subprocess.Popen[bytes]", log: Path) -> bool:
    return node.poll() is not None or "Ray runtime started." in log.read_text()


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _listens(port: int, host: str = HOST) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def _stream(client: httpx.Client) -> str:
    """The finish reason of a streamed completion."""
    body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True}
    answer = client.post("/v1/completions", json=body).raise_for_status()
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", lines[-1]
    return str(json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"])


def wait(what: str, look: Callable[[], object], limit_s: float = LIMIT_S) -> float:
    """Seconds until `look` gives something true."""
    began = time.monotonic()
    wait_until(what, look, limit_s, 0.2)
    return time.monotonic() - began


def ready(url: str) -> tuple[int, str]:
    """Status and phase; 0 while nothing answers, or not within 3 s."""
    with contextlib.suppress(httpx.HTTPError):
        answer = http.get(f"{url}/ready", timeout=3)
        if "phase" in answer.text:
            return answer.status_code, answer.json()["phase"]
    return 0, ""


def run(cluster: Cluster) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    cluster.start()
    cluster.deploy()
    answers: list[tuple[int, str]] = []

    def serves() -> bool:
        answers.append(ready(cluster.url))
        return answers[-1][0] == 200

    wait("a replica serves", serves)
    seen["ready_before"] = sorted(set(answers[:-1]))
    seen["without_key"] = http.get(f"{cluster.url}/v1/models", timeout=60).status_code
    with httpx.Client(base_url=cluster.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=LIMIT_S) as client:
        seen["ending"] = _stream(client)
    return seen


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="own-", ignore_cleanup_errors=True) as directory:
        cluster = Cluster(Path(directory))
        try:
            seen = run(cluster)
            seen["haproxy_ends_s"] = cluster.kill_raylet()
        except BaseException:
            logs = Path(directory) / "ray" / "session_latest" / "logs" / "serve"
            for log in [*Path(directory).glob("node-*"), *logs.glob("*.log")]:
                print(log, log.read_text(errors="replace")[-4000:], sep="\n", file=sys.stderr)
            raise
        finally:
            left = cluster.end()
        print("SEEN " + json.dumps(seen | {"left": left}))


if __name__ == "__main__":
    main()
