"""`drain_node.sh` on the node of an engine, under a stream; run as root:

    python -m tests.programs.drained_node

A head with a front, and two nodes of which each has room for the engine. Each node has an address of the loopback interface, a
temporary directory and a namespace of processes of its own, so that Ray and the script find the node on which they run. Prints
its observations as one line of JSON.
"""

import json
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.harness.programs import free_port
from tests.programs.own_cluster import (
    DEPLOY,
    HOST,
    KEY,
    LIMIT_S,
    OPTIONS,
    Cluster,
    _command_line,
    _listens,
    ready,
    wait,
)

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGTERM")
SECONDS = 300  # the limit of drain_node.sh
TOKENS = 400


class SeparateNodes(Cluster):
    def start(self) -> None:
        self.write_keys()
        port, dashboard = free_port(), self._dashboard
        self._node(
            f"--head --port={port} --dashboard-host={HOST} --dashboard-port={dashboard}",
            OPTIONS.replace("--num-cpus=3", "--num-cpus=0"),
        )
        wait("the head", lambda: self.shell(f"ray health-check --address={HOST}:{port}", check=False))
        wait("the dashboard", lambda: _listens(dashboard))
        common = OPTIONS.replace(' --resources={"front":1}', "")
        for number in (3, 4):
            directory = self.directory / f"n{number}"
            directory.mkdir(mode=0o700)
            agent = f"--dashboard-agent-listen-port={free_port()} --dashboard-agent-grpc-port={free_port()}"
            self._node(
                f"--address={HOST}:{port} {agent}",
                common.replace(HOST, f"127.0.0.{number}"),
                (*NAMESPACE, "env", f"RAY_TMPDIR={directory}"),
            )

    def replicas(self, node: int) -> int:
        """How many run on the first or second of the two nodes."""
        commands = (_command_line(child.pid) for child in psutil.Process(self.nodes[1 + node].pid).children(True))
        return sum(line.startswith("ray::ServeReplica") for line in commands)

    def drain(self, node: int) -> "subprocess.CompletedProcess[str]":
        (first,) = psutil.Process(self.nodes[1 + node].pid).children()
        inside = ["nsenter", "-t", str(first.pid), "--pid", "--mount"]
        env = self.env | {"RAY_TMPDIR": str(self.directory / f"n{3 + node}")}
        command = [*inside, str(DEPLOY / "drain_node.sh"), str(SECONDS)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=SECONDS + 60)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="dn-", ignore_cleanup_errors=True) as directory:
        cluster = SeparateNodes(Path(directory))
        try:
            print(json.dumps(watch(cluster)))
        finally:
            cluster.end()


def watch(cluster: SeparateNodes) -> dict[str, object]:
    cluster.start()
    cluster.deploy()
    wait("an engine serves", lambda: ready(cluster.url)[0] == 200)
    (node,) = (each for each in (0, 1) if cluster.replicas(each))
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "Once", "max_tokens": TOKENS, "ignore_eos": True, "seed": 5}
    statuses: list[int] = []
    texts: list[str] = []
    ended = threading.Event()
    with httpx.Client(base_url=cluster.url, headers=headers, timeout=LIMIT_S) as client:

        def ask() -> None:
            while not ended.wait(0.2):
                try:
                    statuses.append(client.post("/v1/completions", json=body | {"max_tokens": 4}).status_code)
                except httpx.HTTPError:
                    statuses.append(0)

        def stream() -> None:
            while not ended.is_set():
                try:
                    answer = client.post("/v1/completions", json=body | {"stream": True})
                except httpx.HTTPError:
                    texts.append("")
                    continue
                lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
                texts.append("".join(choice["text"] for line in lines for choice in json.loads(line)["choices"]))

        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        threads = [threading.Thread(target=work) for work in (ask, stream)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        drained = cluster.drain(node)
        seconds = time.monotonic() - began
        left, there = cluster.replicas(node), cluster.replicas(1 - node)
        time.sleep(3)
        ended.set()
        for thread in threads:
            thread.join()
    return {
        "output": drained.stdout + drained.stderr,
        "returned_after_s": round(seconds, 1),
        "replicas_left_there": left,
        "replicas_elsewhere": there,
        "statuses": {status: statuses.count(status) for status in set(statuses)},
        "streams": len(texts),
        "streams_that_differ": sum(text != whole for text in texts),
    }


if __name__ == "__main__":
    main()
