"""Run as a program: a server with 4 CPU ranks under 20 live streams loses a node, goes on with 3 ranks, and grows back to 4.

    python -m tests.programs.fewer_ranks

Prints its observations as one line of JSON, and ends with an error if a stream was lost or a text differs. Sums over 3 ranks
are added in another order than over 4, so greedy texts could part where two tokens are equally likely but for rounding. So the
texts of undisturbed runs on 4 and on 3 ranks are compared too: `parting` counts the prompts whose texts differ already there.
Their disturbed texts are compared up to that position, all others as a whole.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from benchmarks.harness.programs import free_port
from cluster.driver.placement import REPLICA_BUNDLE
from tests.support.main_thread import MainThread
from tests.support.programs import REPOSITORY
from tests.support.ray_nodes import few_processes
from tests.support.waiting import until

NUM_STREAMS = 20
MAX_TOKENS = 240
# One rank fits on a node, and the replica only beside rank 0, which has the smaller bundle.
CPUS_OF_A_NODE = 2
CPUS_OF_A_RANK = 1.95
PROMPTS = [f"Question {number}: who are you, and what can you do {number} times?" for number in range(NUM_STREAMS)]


def config(port: int) -> dict[str, Any]:
    args = {
        "model_id": "demo",
        "ckpt_dir": "demo",
        "model_parallel_size": 4,
        "cpus_per_rank": CPUS_OF_A_RANK,
        "max_seq_len": 512,
        "dtype": "float32",
        "spare_ranks": False,
        "shrink_after_s": 2,
    }
    application = {"name": "llama", "route_prefix": "/", "import_path": "deployments.app:build_app", "args": args}
    http = {"host": "127.0.0.1", "port": port}
    return {"http_options": http, "proxy_location": "HeadOnly", "applications": [application]}


class Streams:
    """Clients that stream one completion after the other, each with its own prompt, and keep every text."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.texts: list[tuple[int, str]] = []
        self.losses: list[str] = []
        self._http = http
        self._is_over = False

    async def text(self, number: int) -> str:
        """The whole text of one stream; '' and a loss if it does not end as it must."""
        body = {"model": "demo", "prompt": PROMPTS[number], "max_tokens": MAX_TOKENS, "temperature": 0}
        text, reason = "", None
        try:
            options = {"json": body | {"stream": True, "ignore_eos": True}, "timeout": 300}
            async with self._http.stream("POST", "/v1/completions", **options) as response:  # type: ignore[arg-type]
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        text, reason = text + choice["text"], choice["finish_reason"] or reason
        except (httpx.HTTPError, KeyError, ValueError) as error:
            reason = repr(error)
        if reason == "length":
            return text
        self.losses.append(f"stream {number}: {reason}")
        return ""

    async def all_texts(self) -> list[str]:
        return list(await asyncio.gather(*map(self.text, range(NUM_STREAMS))))

    async def keep_streaming(self, number: int) -> None:
        while not self._is_over:
            self.texts.append((number, await self.text(number)))

    async def more(self) -> None:
        """Return when every stream that is live now has ended."""
        wanted = len(self.texts) + 2 * NUM_STREAMS
        await until("the live streams have ended", lambda: asyncio.sleep(0, len(self.texts) >= wanted), 600)

    def end(self) -> None:
        self._is_over = True


def common_length(one: str, other: str) -> int:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


def node_of_one_rank(cluster: Cluster) -> Any:
    """A node, not the head, that has a rank's bundle and nothing else of the replica."""
    (group,) = (each for each in placement_group_table().values() if each["state"] == "CREATED")
    nodes = group["bundles_to_node_id"]
    return next(
        node
        for node in cluster.worker_nodes
        if node.node_id in nodes.values() and node.node_id != nodes[REPLICA_BUNDLE]
    )


async def main(cluster: Cluster, main_thread: MainThread, url: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=None)) as http:

        async def serves(num_ranks: int) -> bool:
            with contextlib.suppress(httpx.TransportError):
                answer = await http.get("/props", timeout=10)
                if answer.status_code == 200 and answer.json()["phase"] == "ready":
                    seen[f"shares of {num_ranks}"] = [rank["share"] for rank in answer.json()["ranks"]]
                    return int(answer.json()["world_size"]) == num_ranks
            return False

        await until("4 ranks serve", lambda: serves(4), 600)
        undisturbed = Streams(http)
        on_4 = await undisturbed.all_texts()
        live = Streams(http)
        workers = [asyncio.create_task(live.keep_streaming(number)) for number in range(NUM_STREAMS)]
        await live.more()
        node = node_of_one_rank(cluster)
        began = time.monotonic()
        removing = asyncio.create_task(asyncio.to_thread(lambda: cluster.remove_node(node, allow_graceful=False)))
        await until("3 ranks serve", lambda: serves(3), 600)
        seen["shrunk_s"] = round(time.monotonic() - began, 1)
        await removing
        await live.more()
        on_3 = await undisturbed.all_texts()
        began = time.monotonic()
        await main_thread.run(lambda: cluster.add_node(num_cpus=CPUS_OF_A_NODE))
        await until("4 ranks serve again", lambda: serves(4), 600)
        seen["grown_s"] = round(time.monotonic() - began, 1)
        await live.more()
        live.end()
        await asyncio.gather(*workers)
    shared = [common_length(*pair) if pair[0] != pair[1] else None for pair in zip(on_4, on_3, strict=True)]
    seen["streams"], seen["lost"] = len(live.texts), live.losses + undisturbed.losses
    seen["parting"] = sum(length is not None for length in shared)
    seen["different"] = [
        number for number, text in live.texts if text[: shared[number]] != on_4[number][: shared[number]]
    ]
    return seen


def run(directory: str) -> dict[str, Any]:
    os.environ["RAY_TMPDIR"] = directory  # no other program joins this cluster
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    port, path, log = free_port(), Path(directory) / "serve_config.yaml", Path(directory) / "output"
    path.write_text(yaml.safe_dump(config(port)))
    # A node without its process is dead after 6 s instead of Ray's 30; a node that is only busy has a minute.
    health_checks = {
        "health_check_period_ms": 1000,
        "health_check_timeout_ms": 10_000,
        "health_check_failure_threshold": 6,
    }
    head = {"num_cpus": CPUS_OF_A_NODE, "include_dashboard": False, "_system_config": health_checks}
    with few_processes(logs_to_driver=True):
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(3):
            cluster.add_node(num_cpus=CPUS_OF_A_NODE)
        ray.init(address=cluster.address, namespace="serve", logging_level=logging.WARNING, log_to_driver=False)
        with log.open("wb") as output:
            up = subprocess.Popen(
                [sys.executable, "-m", "cli", "up", str(path), "-v"],
                cwd=REPOSITORY,
                env={**os.environ, "RAY_ADDRESS": cluster.address},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            main_thread = MainThread()
            with ThreadPoolExecutor(1) as pool:
                url = f"http://127.0.0.1:{port}"
                seen = pool.submit(asyncio.run, main(cluster, main_thread, url))
                main_thread.serve_until(seen)
            return seen.result()
        except BaseException:
            print(log.read_text(errors="replace")[-8000:], file=sys.stderr)
            raise
        finally:
            up.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                up.wait(60)
            up.kill()
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        observed = run(directory)
    print("SEEN " + json.dumps(observed))
    if observed["lost"] or observed["different"]:
        raise SystemExit("a stream was lost, or a text differs from the undisturbed run's")
