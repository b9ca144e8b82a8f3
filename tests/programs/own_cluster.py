"""Run by test_own_cluster.py as a program of its own: a cluster of two nodes from the commands of cluster/deploy.

`start_node.sh` starts the head and a second raylet, `serve deploy` deploys serve_cluster.yaml, then scales and updates it, all
under streams. Both nodes have one address of the loopback interface, so HAProxy runs on the head only, and free ports replace
the files' own. Prints its observations as one line of JSON.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
HELD_S = 125.0  # longer than Serve's default of RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S
DRAINING_PERIOD = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
HOST = "127.0.0.2"  # of both nodes; Ray replaces 127.0.0.1 by the machine's other address
OPTIONS = f"--node-ip-address={HOST} --num-cpus=3 --object-store-memory=100000000 --block"
OPTIONS += " --min-worker-port=0 --max-worker-port=0 --disable-usage-stats"


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
        (self.directory / ".llama").mkdir()
        (self.directory / ".llama" / "api_keys").write_text(f"{KEY}\n")
        self.shell("ray get-auth-token --generate")
        port = free_port()
        self._node(f"--head --port={port} --dashboard-host={HOST} --dashboard-port={self._dashboard}")
        wait("the head", lambda: self.shell(f"ray health-check --address={HOST}:{port}", check=False))
        wait("the dashboard", lambda: _listens(self._dashboard))
        agent = f"--dashboard-agent-listen-port={free_port()} --dashboard-agent-grpc-port={free_port()}"
        self._node(f"--address={HOST}:{port} {agent}")

    def _node(self, options: str) -> None:
        """Start a node. Like the service manager of a machine, start it again where `ray start` fails: it gives a raylet 30 s
        to register, which is not enough while other tests keep the machine busy."""
        log = self.directory / f"node-{len(self.nodes)}"
        command = [str(DEPLOY / "start_node.sh"), *options.split(), *OPTIONS.split()]
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

    def deploy(self, num_replicas: int, **args: Any) -> None:
        config = yaml.safe_load((DEPLOY / "serve_cluster.yaml").read_text())
        config |= {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": self.port}}
        ingress, engine = config["applications"]
        application = {  # one process for HTTP and engine
            **ingress,
            "import_path": "deployments.app:build_app",
            "args": engine["args"] | ingress["args"],
            "deployments": [{"name": "LlamaIngress"}],
        }
        config["applications"] = [application]
        # Standby processes would cost processor time only.
        application["args"] |= {"spare_ranks": False, "max_seq_len": 4096} | args
        (application["deployments"][0])["num_replicas"] = num_replicas
        path = self.directory / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        self.shell(f"serve deploy {path} --address http://{HOST}:{self._dashboard}")

    def replicas(self) -> set[str]:
        """The ids of the replicas that run."""
        try:
            token = (self.directory / ".ray" / "auth_token").read_text().strip()
            address = f"http://{HOST}:{self._dashboard}/api/serve/applications/"
            found = http.get(address, headers={"Authorization": f"Bearer {token}"}, timeout=60).json()
            replicas = found["applications"]["llama"]["deployments"]["LlamaIngress"]["replicas"]
        except (httpx.HTTPError, KeyError, ValueError):
            return set()
        # A replica that stops is still listed, as STOPPING, until its process has ended; one that starts, as STARTING.
        return {replica["replica_id"] + ("" if replica["state"] == "RUNNING" else " stops") for replica in replicas}

    def processes(self, name: str) -> list[int]:
        """Processes whose command line contains `name`."""
        return [pid for pid in tagged_processes(self.tag) if name in _command_line(pid)]

    def replica_processes(self) -> list[int]:
        """Replicas whose processes have not ended, draining ones too."""
        return self.processes("ray::ServeReplica")

    def draining_periods(self) -> set[str]:
        """The least number of seconds for which each replica drains, from the environment of its process."""
        found = set()
        for pid in self.replica_processes():
            variables = dict(
                pair.split("=", 1)
                for pair in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
                if "=" in pair
            )
            found.add(variables.get(DRAINING_PERIOD, "Serve's default"))
        return found

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


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


class Streams:
    """Two clients that stream one completion after another, and a count of each kind of end."""

    def __init__(self, url: str) -> None:
        self.endings: Counter[str] = Counter()
        self.longest_pause_s = 0.0
        self._url, self._stopping = url, threading.Event()
        self._threads = [threading.Thread(target=self._stream_on) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _stream_on(self) -> None:
        with httpx.Client(base_url=self._url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120) as http:
            while not self._stopping.wait(0.25):  # leaves processor time to the replicas that start
                began = time.monotonic()
                self.endings[_stream(http)] += 1
                self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - began)

    def stop(self) -> dict[str, int]:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        return dict(self.endings)


def _stream(http: httpx.Client, num_tokens: int = 100, on_line: Callable[[], object] = bool) -> str:
    """The end of a streamed completion: its finish reason, or its error. Calls `on_line` for each line."""
    body = {"prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    try:
        with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return f"{response.status_code} {response.read()[:200]!r}"
            lines = [line for line in response.iter_lines() if on_line() or line.startswith("data: ")]
    except httpx.HTTPError as error:
        return repr(error)
    if lines[-1] != "data: [DONE]":
        return f"cut off: {lines[-1]}"
    return str(json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"])


def hold_over_a_change(cluster: Cluster, change: Callable[[], None]) -> tuple[str, float]:
    """The end of a stream that lives when `change` has HAProxy reloaded, and for how many seconds it lived after that.

    Its ranks are stopped for 4 s again and again: the server takes 10 s without a step for a hang.
    """
    ranks, proxies = cluster.processes("ray::RankWorker"), set(cluster.processes("bin/haproxy"))
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        begun.wait()
        while not over.is_set():
            for number, pause_s in ((signal.SIGSTOP, 4.0), (signal.SIGCONT, 0.05)):
                for rank in ranks:
                    os.kill(rank, number)
                over.wait(pause_s)
        for rank in ranks:
            os.kill(rank, signal.SIGCONT)

    client = httpx.Client(base_url=cluster.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=LIMIT_S)
    with client, ThreadPoolExecutor(2) as pool:
        ending, holding = pool.submit(_stream, client, 4000, begun.set), pool.submit(hold)
        try:
            wait("the stream begins", begun.is_set)
            change()
            wait("HAProxy is reloaded", lambda: set(cluster.processes("bin/haproxy")) - proxies)
            began = time.monotonic()
            with contextlib.suppress(TimeoutError):  # a stream that is cut ends early
                ending.result(HELD_S)
            lived_s = time.monotonic() - began
        finally:
            begun.set()
            over.set()
        holding.result()
        return ending.result(), lived_s


class Stopping:
    """How long replicas stop: an update without room waits for each before the next one starts."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._since_s: dict[str, float] = {}
        self.longest_s = 0.0

    def look(self) -> set[str]:
        """The replicas now, as `Cluster.replicas` names them."""
        now, found = time.monotonic(), self._cluster.replicas()
        for replica in found:
            if replica.endswith(" stops"):
                self.longest_s = max(self.longest_s, now - self._since_s.setdefault(replica, now))
        return found


def all_run(replicas: set[str], count: int) -> bool:
    """Whether there are so many replicas, and none of them starts or stops."""
    return len(replicas) == count and not any(replica.endswith(" stops") for replica in replicas)


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
    # Beside two small replicas one large one has room, but not two.
    small, large = {"cpus_per_rank": 0.7}, {"cpus_per_rank": 1.5, "max_batch_size": 16}
    cluster.deploy(1, **small)
    answers: list[tuple[int, str]] = []
    began = time.monotonic()

    def serves() -> bool:
        answers.append(ready(cluster.url))
        return answers[-1][0] == 200

    wait("a replica serves", serves)
    seen["serves_s"], seen["ready_before"] = time.monotonic() - began, sorted(set(answers[:-1]))
    seen["without_key"] = http.get(f"{cluster.url}/v1/models", timeout=60).status_code
    streams = Streams(cluster.url)
    try:
        first = cluster.replicas()
        cluster.deploy(2, **small)
        seen["scaled_up_s"] = wait("two replicas", lambda: all_run(two := cluster.replicas(), 2) and first < two)
        seen["draining_periods"] = sorted(cluster.draining_periods())
        old = cluster.replicas()
        cluster.deploy(2, **large)
        stopping = Stopping(cluster)
        seen["updated_s"] = wait("two new replicas", lambda: all_run(now := stopping.look(), 2) and not now & old)
        seen["longest_stop_s"] = stopping.longest_s
        cluster.deploy(1, **large)
        seen["scaled_down_s"] = wait("one replica's process", lambda: len(cluster.replica_processes()) == 1)
        wait("one replica", lambda: all_run(cluster.replicas(), 1))
    finally:
        seen["endings"] = streams.stop()
    seen["longest_pause_s"] = streams.longest_pause_s
    answer = http.get(f"{cluster.url}/props", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    seen["max_batch_size"] = answer.json()["max_batch_size"]
    seen["held"], seen["held_s"] = hold_over_a_change(cluster, lambda: cluster.deploy(2, **large))
    return seen


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="own-", ignore_cleanup_errors=True) as directory:
        cluster = Cluster(Path(directory))
        began = time.monotonic()
        try:
            seen = run(cluster)
            seen["haproxy_ends_s"] = cluster.kill_raylet()
        except BaseException:
            logs = Path(directory) / "ray" / "session_latest" / "logs" / "serve"
            for log in [
                *Path(directory).glob("node-*"),
                *logs.glob("controller_*.log"),
                *logs.glob("*LlamaIngress*.log"),
            ]:
                print(log, log.read_text(errors="replace")[-4000:], sep="\n", file=sys.stderr)
            raise
        finally:
            left = cluster.end()
        print("SEEN " + json.dumps(seen | {"left": left, "total_s": time.monotonic() - began}))


if __name__ == "__main__":
    main()
