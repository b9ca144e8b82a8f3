"""Run by test_autoscaling.py as a program: `llama-ray up` on a cluster without free CPUs, which nodes join later.

With the argument `full`, then a replica's node is lost, and the application is deleted. Prints its observations as one line of
JSON.
"""

import asyncio
import contextlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray import serve
from ray.autoscaler.v2.sdk import get_cluster_resource_state
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from benchmarks.harness.programs import free_port
from cluster.wire.process_end import ProcessIdentity, is_running
from tests.conftest import GOLDEN
from tests.support.programs import REPOSITORY
from tests.support.ray_nodes import few_processes
from tests.support.waiting import until

PROMPT = {"model": "golden", "prompt": [1, 264, 495], "temperature": 0, "ignore_eos": True}
# A request whose body is incomplete counts as load, and leaves processor time to the processes that start.
SLOW_BODY_S = 2.0
NUM_TOKENS = 60  # of a completion of the load: enough that some are seen running
LOOK_EACH_S = 0.25  # each look is a request or several, which take processor time from the processes that start


def config(port: int) -> dict[str, Any]:
    args = {
        "model_id": "golden",
        "ckpt_dir": str(GOLDEN / "mp2"),
        "max_seq_len": 4096,
        "dtype": "float32",
        "spare_ranks": False,
        "answer_after_s": 0,  # so that a loading replica answers requests
    }
    autoscaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 0.5,
        # A short dip of the load on a busy machine must not remove a replica that waits for resources.
        "downscale_delay_s": 4,
        "look_back_period_s": 2,
        "metrics_interval_s": 0.5,
    }
    return {
        "http_options": {"host": "127.0.0.1", "port": port},
        "proxy_location": "HeadOnly",  # all nodes of this cluster have one address, and so one port
        "applications": [
            {
                "name": "llama",
                "route_prefix": "/",
                "import_path": "deployments.app:build_app",
                "args": args,
                "deployments": [{"name": "LlamaIngress", "autoscaling_config": autoscaling}],
            }
        ],
    }


def groups() -> dict[str, str]:
    """Placement groups that are not removed: id -> state."""
    return {key: group["state"] for key, group in placement_group_table().items() if group["state"] != "REMOVED"}


class MainThread:
    """Runs calls that work only in the main thread for a coroutine of another thread, whose streams go on meanwhile."""

    def __init__(self) -> None:
        self._calls: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue()

    async def run(self, call: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return await asyncio.wrap_future(future)

    def serve_until(self, done: Future[Any]) -> None:
        while not done.done():
            try:
                future, call = self._calls.get(timeout=0.1)
            except queue.Empty:
                continue
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)


def nodes_of_groups() -> set[str]:
    table = placement_group_table().values()
    return {node for group in table if group["state"] == "CREATED" for node in group["bundles_to_node_id"].values()}


def pending_cpus() -> list[float]:
    """The CPUs that each pending placement group asks for, as Ray reports them to its autoscaler."""
    state = get_cluster_resource_state(ray._private.worker.global_worker.gcs_client)  # type: ignore[attr-defined]
    return [
        sum(bundle.resources_bundle.get("CPU", 0) for bundle in selector.resource_requests)
        for request in state.pending_gang_resource_requests
        for selector in request.bundle_selectors
    ]


class Client:
    """An HTTP client that counts how each completion ended."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.endings: Counter[str] = Counter()
        self.streams_wanted = 0
        self.ranks: dict[tuple[int, ...], int] = {}  # pids of a replica's ranks -> most requests seen running on it

    async def look(self, method: str, path: str, **body: Any) -> httpx.Response | None:
        """None where nothing answers within 10 s."""
        with contextlib.suppress(httpx.TransportError):
            return await self.http.request(method, path, json=body or None, timeout=10)
        return None

    async def props(self) -> tuple[int, ...]:
        """Pids of the ranks of the replica that answers; () if none does."""
        answer = await self.look("GET", "/props")
        if answer is None or answer.status_code != 200 or answer.json()["phase"] != "ready":
            return ()
        pids = tuple(rank["pid"] for rank in answer.json()["ranks"])
        self.ranks[pids] = max(self.ranks.get(pids, 0), answer.json()["requests_running"])
        return pids

    async def stream(
        self, max_tokens: int = NUM_TOKENS, begun: asyncio.Event | None = None, slow_body_s: float = 0.0
    ) -> str:
        """The end of a streamed completion: its finish reason, or its error. slow_body_s: until its body is complete."""
        body = json.dumps(PROMPT | {"max_tokens": max_tokens, "stream": True}).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}

        async def parts() -> AsyncIterator[bytes]:
            yield body[:-1]
            await asyncio.sleep(slow_body_s)
            yield body[-1:]

        reason, done, count = "no finish reason", False, 0
        try:
            async with self.http.stream(
                "POST", "/v1/completions", content=parts(), headers=headers, timeout=180
            ) as response:
                if response.status_code != 200:
                    return f"{response.status_code} {(await response.aread())[:200]!r}"
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        reason, count = choice["finish_reason"] or reason, count + 1
                        if begun is not None:
                            begun.set()
        except httpx.HTTPError as error:
            return type(error).__name__
        return reason if done and count > 1 else f"cut off: {count} chunks, {reason}"

    async def stream_until_it_fails(self, begun: asyncio.Event) -> str:
        """How the first stream ended that was not whole; at most 50 streams."""
        for _ in range(50):
            if (ending := await self.stream(4000, begun)) != "length":
                return ending
        return "length"

    async def keep_streaming(self, worker: int) -> None:
        """Stream one completion after the other while `worker` is below the wanted number of streams."""
        while True:
            if worker < self.streams_wanted:
                self.endings[await self.stream(slow_body_s=SLOW_BODY_S)] += 1
            await asyncio.sleep(0.05)


async def end(up: subprocess.Popen[bytes], seen: dict[str, Any], ranks: dict[int, ProcessIdentity]) -> None:
    """End the server by SIGTERM, and note what is left of it."""
    up.send_signal(signal.SIGTERM)
    seen["exit"] = await asyncio.to_thread(up.wait, 180)
    seen["groups_after"] = list(groups().values())
    seen["ranks_after"] = sum(is_running(process) for process in ranks.values())


async def main(
    cluster: Cluster, main_thread: MainThread, up: subprocess.Popen[bytes], log: Path, url: str, *, is_full: bool
) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    began = time.monotonic()

    def stamp(name: str) -> None:
        nonlocal began
        seen[f"{name}_s"], began = round(time.monotonic() - began, 2), time.monotonic()

    def said(words: str) -> str | None:
        return next((line for line in log.read_text(errors="replace").splitlines() if words in line), None)

    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_keepalive_connections=0)) as http:
        client = Client(http)

        # No node has room for a replica.
        async def is_pending() -> bool:
            return "PENDING" in groups().values()

        await until("a placement group waits", is_pending, 160, LOOK_EACH_S)
        stamp("submitted")
        early: list[int] = []

        async def waits() -> str | None:
            answer = await client.look("GET", "/ready")
            early.append(answer.status_code if answer is not None else 0)
            return said("Waiting for room")

        seen["waiting"] = await until("the line", waits, pause_s=LOOK_EACH_S)
        stamp("waiting")
        seen["warning"] = await until("the warning", lambda: asyncio.sleep(0, said("it waits until there is room")))
        seen["ready_without_room"] = sorted(set(early))

        # A node joins: room for one replica.
        await main_thread.run(lambda: cluster.add_node(num_cpus=2))
        loading: list[dict[str, Any]] = []

        async def is_ready() -> bool:
            ready = await client.look("GET", "/ready")
            if ready is not None and ready.status_code == 200:
                return True
            if ready is not None and "phase" in ready.text:
                health = await client.look("GET", "/health")
                post = await client.look("POST", "/v1/completions", **PROMPT)
                if health is not None and post is not None and post.status_code != 200:
                    loading.append(
                        {
                            "health": health.status_code,
                            "ready": [ready.status_code, ready.headers.get("Retry-After"), ready.json()["phase"]],
                            "completion": [post.status_code, post.headers.get("Retry-After"), post.json()],
                        }
                    )
            return False

        await until("ready", is_ready, 240, LOOK_EACH_S)
        stamp("first_replica")
        seen["loading"] = loading
        await until("the banner", lambda: asyncio.sleep(0, said("is ready at")))
        seen["first"] = list(await until("the ranks of the first replica", client.props))

        # More load than one replica takes.
        workers = [asyncio.create_task(client.keep_streaming(i)) for i in range(4)]
        client.streams_wanted = 4

        async def wants_more() -> bool:
            return sorted(groups().values()) == ["CREATED", "PENDING"]

        await until("a second placement group waits", wants_more, pause_s=LOOK_EACH_S)
        stamp("second_wanted")
        seen["autoscaler_sees_cpus"] = await until("the autoscaler sees it", lambda: asyncio.sleep(0, pending_cpus()))
        served = client.endings.total()
        await until("completions meanwhile", lambda: asyncio.sleep(0, client.endings.total() >= served + 4))
        await until("a second placement group still waits", wants_more)
        seen["groups_while_waiting"] = sorted(groups().values())
        seen["replicas_while_waiting"] = len(client.ranks)

        # Another node joins: room for two replicas. A pause of the load until it has started would remove one.
        await main_thread.run(lambda: cluster.add_node(num_cpus=2))

        def running() -> dict[tuple[int, ...], dict[int, ProcessIdentity]]:
            """The replicas seen whose ranks all run; a busy machine may have replaced one meanwhile."""
            known = {pids: {pid: ProcessIdentity.of(pid) for pid in pids} for pids in client.ranks}
            return {pids: ranks for pids, ranks in known.items() if all(map(is_running, ranks.values()))}

        async def both_work() -> dict[tuple[int, ...], dict[int, ProcessIdentity]] | None:
            await client.props()
            both = running()
            settled = sorted(groups().values()) == ["CREATED", "CREATED"]
            return both if settled and len(both) == 2 and all(client.ranks[pids] for pids in both) else None

        what = "two replicas have rows to run and a placement group each"
        replicas = await until(what, both_work, 240, LOOK_EACH_S)
        stamp("second_replica")
        processes = {pid: process for ranks in replicas.values() for pid, process in ranks.items()}
        seen["ranks_under_load"] = sum(is_running(process) for process in processes.values())

        # One stream at a time, which one replica can serve.
        client.streams_wanted = 1

        async def one_is_gone() -> list[int] | None:
            left = [pid for pid, process in processes.items() if is_running(process)]
            return left if len(left) == 2 and len(groups()) == 1 else None

        left = await until("one replica's ranks and placement group are gone", one_is_gone, 240, LOOK_EACH_S)
        stamp("gone")
        seen["left"] = left
        seen["left_is_one_replica"] = tuple(left) in client.ranks
        seen["groups_left"] = list(groups().values())
        served = client.endings.total()
        await until("completions afterwards", lambda: asyncio.sleep(0, client.endings.total() > served))
        seen["answers"] = list(await until("an answer", client.props))
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        seen["endings"] = client.endings
        if not is_full:
            await end(up, seen, {pid: ProcessIdentity.of(pid) for pid in left})
            return seen

        # The replica's node is lost during a stream; the other node has room.
        begun = asyncio.Event()
        cut = asyncio.create_task(client.stream_until_it_fails(begun))
        await asyncio.wait_for(begun.wait(), 120)
        (lost,) = (node for node in cluster.worker_nodes if node.node_id in nodes_of_groups())
        removing = asyncio.get_running_loop().run_in_executor(
            None, lambda: cluster.remove_node(lost, allow_graceful=False)
        )
        lost_at, processes = time.monotonic(), {pid: ProcessIdentity.of(pid) for pid in left}
        seen["stream_of_the_lost_node"] = await cut
        seen["cut_s"] = time.monotonic() - lost_at
        # Requests now wait for the next replica, or get 503 with Retry-After.
        meanwhile = [asyncio.create_task(client.stream()) for _ in range(4)]

        async def all_are_gone() -> bool:
            return not any(is_running(process) for process in processes.values())

        await until("the lost node's ranks are gone", all_are_gone)
        seen["lost_ranks_gone_s"] = time.monotonic() - lost_at

        async def is_placed_anew() -> tuple[int, ...]:
            return await client.props()

        anew = await until("another replica serves", is_placed_anew, 360, LOOK_EACH_S)
        seen["placed_anew_s"] = time.monotonic() - lost_at
        seen["meanwhile"] = await asyncio.gather(*meanwhile)
        seen["anew"], seen["after_node_loss"] = list(anew), await client.stream()
        await removing
        stamp("node_lost")
        processes = {pid: ProcessIdentity.of(pid) for pid in anew}

        # The application is deleted during a stream; then the server ends.
        all_begun, late = [asyncio.Event() for _ in range(8)], set()
        # Together they last long enough for a busy machine to ask for readiness meanwhile.
        last = asyncio.gather(*(client.stream(2000, begun) for begun in all_begun))
        await asyncio.wait_for(asyncio.gather(*(begun.wait() for begun in all_begun)), 120)
        deleting = asyncio.create_task(asyncio.to_thread(serve.delete, "llama"))

        async def is_drained() -> bool:
            ready = await client.look("GET", "/ready")
            if ready is not None and not last.done():
                late.add(ready.status_code)
            return last.done()

        await until("the live streams have ended", is_drained, 240)
        seen["ready_while_draining"], seen["streams_while_draining"] = sorted(late - {200}), sorted(set(await last))
        await deleting

        async def nothing_is_left() -> bool:
            return not groups() and not any(is_running(process) for process in processes.values())

        await until("the application's ranks and placement groups are gone", nothing_is_left)
        stamp("drained")
        await end(up, seen, processes)
        stamp("ended")
    return seen


def run(directory: str, *, is_full: bool) -> dict[str, Any]:
    # Ray keeps the address of the machine's cluster here, so no other program joins this cluster by accident.
    os.environ["RAY_TMPDIR"] = directory
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"  # the cluster's as well as the server's
    # Serve's default is 0.1 s, which takes a tenth of a core as long as the controller lives.
    os.environ["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] = "0.4"
    port, path, log = free_port(), Path(directory) / "serve_config.yaml", Path(directory) / "output"
    path.write_text(yaml.safe_dump(config(port)))
    # A node without its process is dead after 6 s instead of Ray's 30; a node that is only busy has a minute.
    health_checks = {
        "health_check_period_ms": 1000,
        "health_check_timeout_ms": 10_000,
        "health_check_failure_threshold": 6,
    }
    # The head has no CPUs: it must not be lost with a replica.
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": health_checks}
    with few_processes(logs_to_driver=True):  # `llama-ray up -v` shows the lines of workers
        return serve_on(Cluster(initialize_head=True, head_node_args=head), port, path, log, is_full=is_full)


def serve_on(cluster: Cluster, port: int, path: Path, log: Path, *, is_full: bool) -> dict[str, Any]:
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
            seen = pool.submit(asyncio.run, main(cluster, main_thread, up, log, url, is_full=is_full))
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
        print("SEEN " + json.dumps(run(directory, is_full=sys.argv[1:] == ["full"])))
