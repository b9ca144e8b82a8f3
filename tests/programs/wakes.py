"""Two models that sleep and wake under requests, on a cluster of two nodes from cluster/deploy whose head has a Redis.

    python -m tests.programs.wakes --wakes 20

Fronts and engines run on the second node. Between two wakes once a front is killed, and once the head. A third model is asked
all the time. Needs redis-server. Prints its observations as one line of JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import yaml

from benchmarks.harness.programs import free_port
from deployments.local.process_tag import tagged_processes
from tests.chaos.asks import Ask, asks
from tests.chaos.load import Heard, hear
from tests.programs.own_cluster import HOST, OPTIONS, Cluster, _command_line, _listens, wait
from tests.support.waiting import until

MODELS: Final = ("drowsy", "sleepy")
KINDS: Final = ("greedy", "seeded", "whole", "chat")
HEAD: Final = OPTIONS.replace("--num-cpus=3", "--num-cpus=0").replace('{"front":1}', "{}")
NODE: Final = OPTIONS.replace('{"front":1}', '{"front":2}')
HEAD_AWAY_S: Final = 15.0
SCALING: Final[dict[str, Any]] = {
    "min_replicas": 0,
    "max_replicas": 1,
    "metrics_interval_s": 1.0,
    "look_back_period_s": 4.0,
    "downscale_delay_s": 2.0,
    "policy": {"policy_function": "deployments.fleet.scaling:ExpectedTime"},
}


def engine(model: str, **options: Any) -> dict[str, Any]:
    args = {"model_id": model, "ckpt_dir": "demo", "model_parallel_size": 1, "cpus_per_rank": 0.5, "spare_ranks": False}
    place = {"name": model, "route_prefix": None, "import_path": "deployments.app:build_engine", "args": args}
    return place | {"deployments": [{"name": "LlamaEngine"} | options]}


class SleepyCluster(Cluster):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._gcs, redis = free_port(), free_port()
        self.env |= {"RAY_REDIS_ADDRESS": f"127.0.0.1:{redis}", "LLAMA_FRONT_SOCKETS": ""}
        command = ["redis-server", "--port", str(redis), "--bind", "127.0.0.1", "--save", ""]
        self._redis = subprocess.Popen(command, env=self.env, stdout=subprocess.DEVNULL)

    def start(self) -> None:
        (self.directory / ".llama").mkdir()
        self.shell("ray get-auth-token --generate")
        self.start_head()
        agent = f"--dashboard-agent-listen-port={free_port()} --dashboard-agent-grpc-port={free_port()}"
        self._node(f"--address={HOST}:{self._gcs} {agent}", NODE)

    def start_head(self) -> None:
        dashboard = f"--dashboard-host={HOST} --dashboard-port={self._dashboard}"
        self._node(f"--head --port={self._gcs} {dashboard}", HEAD)
        wait("the dashboard", lambda: _listens(self._dashboard))

    def kill_head(self) -> None:
        """The control service, with which `ray start --block` ends all of the head."""
        (gcs,) = self.processes("/gcs_server")
        os.kill(gcs, signal.SIGKILL)
        head = self.nodes.pop(0)
        head.wait(60)
        # Ray takes the other node's processes, which name the address, for a control service.
        (self.directory / "ray" / "ray_current_cluster").unlink(missing_ok=True)

    def end(self) -> list[str]:
        self._redis.terminate()
        self._redis.wait()
        return super().end()

    def deploy(self) -> None:
        ingress = {"name": "llama", "route_prefix": "/", "import_path": "deployments.app:build_ingress", "args": {}}
        front = {"name": "LlamaIngress", "num_replicas": 2}
        front |= {"ray_actor_options": {"num_cpus": 0, "resources": {"front": 1}}}
        engines = [engine(model, autoscaling_config=SCALING) for model in MODELS]
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [ingress | {"deployments": [front]}, *engines, engine("third", num_replicas=1)],
        }
        (self.directory / "serve.yaml").write_text(yaml.safe_dump(config))
        self.shell(f"serve deploy {self.directory}/serve.yaml --address http://{HOST}:{self._dashboard}")

    def processes(self, name: str) -> list[int]:
        return [pid for pid in tagged_processes(self.tag) if name in _command_line(pid)[:200]]

    def fronts(self) -> dict[int, str]:
        """The URL of each front that lists all models, by its process."""
        found = {}
        for pid in self.processes("ray::ServeReplica:llama:"):
            with contextlib.suppress(psutil.Error):
                for each in psutil.Process(pid).net_connections("tcp"):
                    url = f"http://127.0.0.1:{each.laddr.port}"
                    if each.status == "LISTEN" and set(statuses(url)) == {*MODELS, "third"}:
                        found[pid] = url
        return found

    def starts(self) -> int:
        """Engines that Serve has asked for, of the models that sleep."""
        logs = self.directory.glob("ray/session_*/logs/serve/controller_*.log")
        text = "\n".join(log.read_text(errors="replace") for log in {log.resolve() for log in logs})
        return len(re.findall(rf"Upscaling Deployment\(name='LlamaEngine', app='(?:{'|'.join(MODELS)})'\)", text))


def statuses(url: str) -> dict[str, str]:
    with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
        models = httpx.get(f"{url}/v1/models", timeout=2, trust_env=False).json()["data"]
        return {model["id"]: model["status"] for model in models}
    return {}


@dataclass
class Course:
    clients: list[httpx.AsyncClient] = field(default_factory=list)
    expected: dict[str, list[Heard]] = field(default_factory=dict)
    num_answers: int = 0
    failed: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    woken_s: list[float] = field(default_factory=list)  # from the burst to the first token
    after_engine_s: list[float] = field(default_factory=list)  # to the first token, from the engine's connection
    third_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})  # by whether a model wakes
    wakes: bool = False

    def use(self, cluster: SleepyCluster) -> None:
        """The clients of the fronts that run."""
        fronts = wait_for_fronts(cluster)
        self.clients = [httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) for url in fronts.values()]


def wait_for_fronts(cluster: SleepyCluster) -> dict[int, str]:
    found: dict[int, str] = {}

    def both() -> bool:
        found.clear()
        found.update(cluster.fronts())
        return len(found) == 2

    wait("two fronts", both)
    return found


def asks_of(model: str) -> list[Ask]:
    return asks(8, model, 40, kinds=KINDS)


async def burst(course: Course, model: str, clients: list[httpx.AsyncClient]) -> None:
    began = time.time()
    connected = asyncio.create_task(until("an engine", lambda: connection(clients[0], model), 240, 0.1))
    answers = await asyncio.gather(*(hear(clients[i % len(clients)], ask) for i, ask in enumerate(asks_of(model))))
    course.num_answers += len(answers)
    course.failed += [f"{model}: {heard.error}" for heard in answers if heard.error is not None or not heard.done]
    known = course.expected.setdefault(model, answers)
    course.differing += [model for heard, once in zip(answers, known, strict=True) if heard.content != once.content]
    first = min((heard.times[0] for heard in answers if heard.times), default=began)
    course.woken_s.append(first - began)
    course.after_engine_s.append(first - await connected)


async def connection(client: httpx.AsyncClient, model: str) -> float | None:
    """When the front has an engine of the model, by time.time()."""
    with contextlib.suppress(httpx.HTTPError):
        engines = (await client.get("/props")).json()["engines"]
        return time.time() if any(each["model"] == model for each in engines) else None
    return None


async def ask_third(course: Course) -> None:
    (ask,) = asks(1, "third", 8, kinds=("greedy",))
    while True:
        await asyncio.sleep(0.3)
        wakes, began = course.wakes, time.time()
        heard = await hear(course.clients[-1], ask)
        course.num_answers += 1
        if heard.error is not None or not heard.done:
            course.failed.append(f"third: {heard.error}")
        else:
            course.third_s[wakes or course.wakes].append(heard.times[0] - began)


async def wake_all(course: Course, clients: list[httpx.AsyncClient]) -> None:
    course.wakes = True
    await asyncio.gather(*(burst(course, model, clients) for model in MODELS))
    course.wakes = False


async def all_sleep(cluster: SleepyCluster, course: Course) -> None:
    def sleep() -> bool:
        known = [statuses(str(client.base_url)) for client in course.clients]
        asleep = dict.fromkeys(MODELS, "sleeping") | {"third": "ready"}
        return all(each == asleep for each in known) and not any(
            cluster.processes(f"ray::ServeReplica:{model}:") for model in MODELS
        )

    await asyncio.to_thread(wait, "both models sleep", sleep)


async def run(cluster: SleepyCluster, num_wakes: int) -> dict[str, Any]:
    course = Course()
    await asyncio.to_thread(course.use, cluster)
    third = asyncio.create_task(ask_third(course))
    restarted_s = away_s = 0.0
    num_rounds = num_wakes // len(MODELS)
    for number in range(num_rounds):
        await all_sleep(cluster, course)
        await asyncio.sleep(2)  # of the third model alone
        print(f"{number}: {course.num_answers} answers, {course.failed} {course.woken_s}", file=sys.stderr, flush=True)
        clients = course.clients
        if number == num_rounds // 3:
            third.cancel()  # its client is one of the front's
            pid, _ = min(cluster.fronts().items())
            os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(course.use, cluster)
            known = [each for at, each in cluster.fronts().items() if at != pid]
            clients = [each for each in course.clients if str(each.base_url).rstrip("/") == known[-1]]
            third = asyncio.create_task(ask_third(course))
        if number == 2 * num_rounds // 3:
            await asyncio.to_thread(cluster.kill_head)
            began_s = time.monotonic()
            waking = asyncio.create_task(wake_all(course, clients))
            await asyncio.sleep(HEAD_AWAY_S)
            await asyncio.to_thread(cluster.start_head)
            restarted_s = time.monotonic() - began_s
            await waking
            away_s = time.monotonic() - began_s
            continue
        await wake_all(course, clients)
    third.cancel()
    usual = [each for each in course.woken_s if each < HEAD_AWAY_S]
    return {
        "wakes": len(course.woken_s),
        "starts": cluster.starts(),
        "answers": course.num_answers,
        "failed": course.failed,
        "different": len(course.differing),
        "first_token_s": [round(statistics.median(usual), 2), round(max(usual), 2)],
        "after_engine_s": [round(statistics.median(course.after_engine_s), 2), round(max(course.after_engine_s), 2)],
        "third_ttft_ms": {
            "asleep" if not wakes else "waking": [round(1e3 * statistics.median(each)), len(each)]
            for wakes, each in course.third_s.items()
        },
        "head_back_s": round(restarted_s, 1),
        "answered_after_head_was_lost_s": round(away_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wakes", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="s-", ignore_cleanup_errors=True) as directory:
        cluster = SleepyCluster(Path(directory))
        try:
            cluster.start()
            cluster.deploy()
            seen = asyncio.run(run(cluster, options.wakes))
        except BaseException:
            for log in [*Path(directory).glob("node-*"), *Path(directory).glob("ray/session_latest/logs/serve/*.log")]:
                print(log, log.read_text(errors="replace")[-3000:], sep="\n", file=sys.stderr)
            raise
        finally:
            cluster.end()
        print("SEEN " + json.dumps(seen))


if __name__ == "__main__":
    main()
