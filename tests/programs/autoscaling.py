"""Run by test_autoscaling.py as a program: `llama-ray up` on a cluster without free CPUs, which nodes join later.

Prints its observations as one line of JSON.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from benchmarks.harness.programs import free_port
from cluster.wire.process_end import ProcessIdentity, is_running
from tests.conftest import GOLDEN
from tests.programs.counting_client import PROMPT, CountingClient
from tests.support.programs import REPOSITORY
from tests.support.ray_nodes import MainThread, few_processes
from tests.support.waiting import until, until_true

LOOK_EACH_S = 0.25  # each look is a request or several, which take processor time from the processes that start


def config(port: int) -> dict[str, Any]:
    args = {"model_id": "golden", "ckpt_dir": str(GOLDEN / "mp2"), "max_seq_len": 4096, "dtype": "float32"}
    args |= {"spare_ranks": False, "answer_after_s": 0}  # so that a loading replica answers requests
    autoscaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "upscale_delay_s": 0.5}
    # A short dip of the load on a busy machine must not remove a replica that waits for resources.
    autoscaling |= {"downscale_delay_s": 4, "look_back_period_s": 2, "metrics_interval_s": 0.5}
    deployments = [{"name": "LlamaIngress", "autoscaling_config": autoscaling}]
    application = {"name": "llama", "route_prefix": "/", "import_path": "deployments.app:build_app"}
    return {
        "http_options": {"host": "127.0.0.1", "port": port},
        "proxy_location": "HeadOnly",  # all nodes of this cluster have one address, and so one port
        "applications": [application | {"args": args, "deployments": deployments}],
    }


def groups() -> dict[str, str]:
    """Placement groups that are not removed: id -> state."""
    return {key: group["state"] for key, group in placement_group_table().items() if group["state"] != "REMOVED"}


def pending_cpus() -> list[float]:
    """The CPUs that each pending placement group asks for, as Ray reports them to its autoscaler."""
    state = get_cluster_resource_state(ray._private.worker.global_worker.gcs_client)  # type: ignore[attr-defined]
    return [
        sum(bundle.resources_bundle.get("CPU", 0) for bundle in selector.resource_requests)
        for request in state.pending_gang_resource_requests
        for selector in request.bundle_selectors
    ]


Processes = dict[int, ProcessIdentity]  # by pid


def identified(pids: Iterable[int]) -> Processes:
    """The processes that have these ids now, which others may get later."""
    return {pid: ProcessIdentity.of(pid) for pid in pids}


def running(processes: Processes) -> list[int]:
    return [pid for pid, process in processes.items() if is_running(process)]


class Observations(dict[str, Any]):
    """What this program prints."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._log = log  # of the server

    async def said(self, words: str) -> str | None:
        """The first line of the server's log with these words."""
        lines = self._log.read_text(errors="replace").splitlines()
        return next((line for line in lines if words in line), None)


async def no_node_has_room(client: CountingClient, seen: Observations) -> None:
    """The first replica waits, and the server says so."""
    await until_true("a placement group waits", lambda: "PENDING" in groups().values(), 160, LOOK_EACH_S)
    early: list[int] = []

    async def waits() -> str | None:
        answer = await client.look("GET", "/ready")
        early.append(answer.status_code if answer is not None else 0)
        return await seen.said("Waiting for room")

    seen["waiting"] = await until("the line", waits, pause_s=LOOK_EACH_S)
    seen["warning"] = await until("the warning", lambda: seen.said("it waits until there is room"))
    seen["ready_without_room"] = sorted(set(early))


async def answers_while_loading(client: CountingClient, ready: httpx.Response) -> dict[str, Any] | None:
    """How a replica that loads, and has answered `ready`, answers other requests; None if it does not load any more."""
    health = await client.look("GET", "/health")
    post = await client.look("POST", "/v1/completions", **PROMPT)
    if health is None or post is None or post.status_code == 200:
        return None
    return {
        "health": health.status_code,
        "ready": [ready.status_code, ready.headers.get("Retry-After"), ready.json()["phase"]],
        "completion": [post.status_code, post.headers.get("Retry-After"), post.json()],
    }


async def the_first_replica_starts(client: CountingClient, seen: Observations) -> None:
    """A node has joined, which has room for one replica."""
    loading: list[dict[str, Any]] = []

    async def is_ready() -> bool:
        ready = await client.look("GET", "/ready")
        if ready is not None and ready.status_code == 200:
            return True
        if ready is not None and "phase" in ready.text:
            answers = await answers_while_loading(client, ready)
            loading.extend([answers] if answers is not None else [])
        return False

    await until("ready", is_ready, 240, LOOK_EACH_S)
    seen["loading"] = loading
    await until("the banner", lambda: seen.said("is ready at"))
    seen["first"] = list(await until("the ranks of the first replica", client.props))


async def a_second_replica_waits(client: CountingClient, seen: Observations) -> None:
    """More load than one replica takes makes another placement group wait, which a cluster autoscaler sees."""

    def wants_more() -> bool:
        return sorted(groups().values()) == ["CREATED", "PENDING"]

    await until_true("a second placement group waits", wants_more, pause_s=LOOK_EACH_S)
    await until_true("the autoscaler sees it", pending_cpus)
    seen["autoscaler_sees_cpus"] = pending_cpus()
    served = client.endings.total()
    await until_true("completions meanwhile", lambda: client.endings.total() >= served + 4)
    await until_true("a second placement group still waits", wants_more)
    seen["groups_while_waiting"] = sorted(groups().values())
    seen["replicas_while_waiting"] = len(client.ranks)


async def the_second_replica_serves(client: CountingClient, seen: Observations) -> Processes:
    """Another node has joined, which has room for the second replica. Returns the ranks of both."""

    def replicas() -> list[tuple[int, ...]]:
        """The replicas seen whose ranks all run; a busy machine may have replaced one meanwhile."""
        return [pids for pids in client.ranks if len(running(identified(pids))) == len(pids)]

    async def both_work() -> Processes | None:
        await client.props()
        both = replicas()
        settled = sorted(groups().values()) == ["CREATED", "CREATED"]
        if not settled or len(both) != 2 or not all(client.ranks[pids] for pids in both):
            return None
        return identified(pid for pids in both for pid in pids)

    what = "two replicas have rows to run and a placement group each"
    ranks = await until(what, both_work, 240, LOOK_EACH_S)
    seen["ranks_under_load"] = len(running(ranks))
    return ranks


async def one_replica_ends(client: CountingClient, ranks: Processes, seen: Observations) -> list[int]:
    """The load is one stream at a time, which one replica can serve. Returns the pids of its ranks."""

    async def one_is_gone() -> list[int] | None:
        left = running(ranks)
        return left if len(left) == 2 and len(groups()) == 1 else None

    left = await until("one replica's ranks and placement group are gone", one_is_gone, 240, LOOK_EACH_S)
    seen["left"] = left
    seen["left_is_one_replica"] = tuple(left) in client.ranks
    seen["groups_left"] = list(groups().values())
    served = client.endings.total()
    await until_true("completions afterwards", lambda: client.endings.total() > served)
    seen["answers"] = list(await until("an answer", client.props))
    return left


async def the_server_ends(up: subprocess.Popen[bytes], ranks: Processes, seen: Observations) -> None:
    """By SIGTERM. Notes what is left of it."""
    up.send_signal(signal.SIGTERM)
    seen["exit"] = await asyncio.to_thread(up.wait, 180)
    seen["groups_after"] = list(groups().values())
    seen["ranks_after"] = len(running(ranks))


@contextlib.asynccontextmanager
async def load(client: CountingClient, num_streams: int) -> AsyncIterator[None]:
    """One completion after the other in `num_streams` streams, or in fewer where `client.streams_wanted` is lowered."""
    workers = [asyncio.create_task(client.keep_streaming(i)) for i in range(num_streams)]
    client.streams_wanted = num_streams
    try:
        yield
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def main(
    cluster: Cluster, main_thread: MainThread, up: subprocess.Popen[bytes], log: Path, url: str
) -> dict[str, Any]:
    seen = Observations(log)
    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_keepalive_connections=0)) as http:
        client = CountingClient(http)
        await no_node_has_room(client, seen)
        await main_thread.run(lambda: cluster.add_node(num_cpus=2))
        await the_first_replica_starts(client, seen)
        async with load(client, 4):
            await a_second_replica_waits(client, seen)
            # A pause of the load until the second replica has started would remove one.
            await main_thread.run(lambda: cluster.add_node(num_cpus=2))
            ranks = await the_second_replica_serves(client, seen)
            client.streams_wanted = 1
            ranks = identified(await one_replica_ends(client, ranks, seen))
        seen["endings"] = client.endings
        await the_server_ends(up, ranks, seen)
    return seen


def run(directory: str) -> dict[str, Any]:
    # Ray keeps the address of the machine's cluster here, so no other program joins this cluster by accident.
    os.environ["RAY_TMPDIR"] = directory
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"  # the cluster's as well as the server's
    # Serve's default is 0.1 s, which takes a tenth of a core as long as the controller lives.
    os.environ["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] = "0.4"
    port, path, log = free_port(), Path(directory) / "serve_config.yaml", Path(directory) / "output"
    path.write_text(yaml.safe_dump(config(port)))
    head = {"num_cpus": 0, "include_dashboard": False}
    with few_processes(logs_to_driver=True):  # `llama-ray up -v` shows the lines of workers
        return serve_on(Cluster(initialize_head=True, head_node_args=head), port, path, log)


def serve_on(cluster: Cluster, port: int, path: Path, log: Path) -> dict[str, Any]:
    """Run the server of the configuration `path` on a cluster, which ends with it."""
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
            seen = pool.submit(asyncio.run, main(cluster, main_thread, up, log, url))
            main_thread.serve_until(seen)
        return seen.result()
    except BaseException:
        print(log.read_text(errors="replace")[-8000:], file=sys.stderr)
        raise
    finally:
        if up.poll() is None:
            up.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                up.wait(20)
            up.kill()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        print("SEEN " + json.dumps(run(directory)))
