"""One model from one engine to four and back under 40 streams, on nodes that Ray's autoscaler adds and removes.

    python -m tests.programs.elastic

The autoscaler's provider is Ray's `fake_multinode`, whose nodes are processes of this machine. Prints its observations as one
line of JSON.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import ray
import yaml

from benchmarks.harness.programs import free_port
from cluster.rank.runner_factory import load_model_runner
from cluster.wire.rank_runner import RankRunner, RendezvousSpec
from llama_core.config import EngineConfig
from llama_core.scheduling.step import Pending, StepInput, StepOutput
from tests.chaos.asks import asks
from tests.chaos.load import Streams
from tests.programs.own_cluster import Cluster, _listens, wait
from tests.support.fake_runner import Faults, FaultyRunner
from tests.support.waiting import until_true

KINDS: Final = ("greedy", "seeded", "logprobs", "chat")
NUM_STREAMS, NUM_LEFT, MAX_ENGINES = 40, 2, 4
STEP_S: Final = 0.03
DOWNSCALE_DELAY_S: Final = 10.0
LOOK_BACK_S: Final = 10.0
COMMON: Final = "--num-cpus=0 --object-store-memory=100000000 --block --min-worker-port=0 --max-worker-port=0"
ARGS: Final = {
    "model_id": "demo",
    "ckpt_dir": "demo",
    "model_parallel_size": 1,
    "cpus_per_rank": 1,
    "spare_ranks": False,
}
SCALING: Final[dict[str, Any]] = {
    "min_replicas": 1,
    "max_replicas": MAX_ENGINES,
    "metrics_interval_s": 1.0,
    "look_back_period_s": LOOK_BACK_S,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": DOWNSCALE_DELAY_S,
    "policy": {"policy_function": "deployments.fleet.scaling:ExpectedTime", "policy_kwargs": {"ttft_s": 1.0}},
}


class SlowRunner(FaultyRunner):
    """A rank's own, whose steps take STEP_S more."""

    def start(self, batch: StepInput) -> Pending[StepOutput]:
        time.sleep(STEP_S)
        output = super().start(batch).result()
        return Pending.done(replace(output, elapsed_ms=output.elapsed_ms + 1e3 * STEP_S))


def slow_ranks(config: EngineConfig, rendezvous: RendezvousSpec, on_progress: Callable[[int, int], None]) -> RankRunner:
    return SlowRunner(load_model_runner(config, rendezvous, on_progress), Faults(lambda phase, step: None))


class ElasticCluster(Cluster):
    """A head with a front, whose autoscaler adds a node for each engine."""

    def start(self) -> None:
        (self.directory / ".llama").mkdir()
        self.shell("ray get-auth-token --generate")
        port, host = free_port(), ray.util.get_node_ip_address()
        commands = [f"{who}_commands" for who in ("initialization", "setup", "head_setup", "worker_setup")]
        commands += ["head_start_ray_commands", "worker_start_ray_commands"]
        lists = [*commands, "cluster_synced_files", "rsync_exclude", "rsync_filter"]
        types = {
            "ray.head.default": {"resources": {}, "node_config": {}, "max_workers": 0},
            "engine": {
                "resources": {"CPU": 1, "object_store_memory": 100_000_000},
                "node_config": {},
                "min_workers": 0,
            },
        }
        types["engine"]["max_workers"] = MAX_ENGINES
        provider = {"type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True}
        provider |= {"disable_launch_config_check": True, "gcs_address": f"{host}:{port}", "launch_multiple": True}
        config: dict[str, Any] = {"cluster_name": "elastic", "provider": provider, "available_node_types": types}
        config |= {
            "head_node_type": "ray.head.default",
            "max_workers": MAX_ENGINES,
            "upscaling_speed": 10.0,
            "auth": {},
        }
        config |= {"idle_timeout_minutes": 0.1, "file_mounts": {}, **{name: [] for name in lists}}
        path = self.directory / "autoscaler.yaml"
        path.write_text(yaml.safe_dump(config))
        self.env |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        dashboard = f"--dashboard-host=127.0.0.1 --dashboard-port={self._dashboard}"
        self._node(f"--head --port={port} {dashboard} --autoscaling-config={path}", COMMON + ' --resources={"front":1}')
        wait("the dashboard", lambda: _listens(self._dashboard, "127.0.0.1"))

    def deploy(self) -> None:
        front = {"name": "LlamaIngress", "ray_actor_options": {"num_cpus": 0, "resources": {"front": 1}}}
        ingress = {"name": "llama", "route_prefix": "/", "import_path": "deployments.app:build_ingress", "args": {}}
        args = ARGS | {"max_batch_size": 4, "max_queue": 1000, "placement_strategy": "STRICT_PACK", "device": "cpu"}
        args |= {"runner_factory": "tests.programs.elastic:slow_ranks"}
        place = {"name": "demo", "route_prefix": None, "import_path": "deployments.app:build_engine", "args": args}
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [
                ingress | {"deployments": [front]},
                place | {"deployments": [{"name": "LlamaEngine", "autoscaling_config": SCALING}]},
            ],
        }
        (self.directory / "serve.yaml").write_text(yaml.safe_dump(config))
        self.shell(f"serve deploy {self.directory}/serve.yaml --address http://127.0.0.1:{self._dashboard}")

    def decisions(self) -> list[str]:
        """What Serve has changed, in turn."""
        (log,) = self.directory.glob("ray/session_latest/logs/serve/controller_[0-9]*.log")
        lines = log.read_text(errors="replace").splitlines()
        print(*(line for line in lines if "scaling " in line), sep="\n", file=sys.stderr)
        return [line.partition("from ")[2].partition(" replicas")[0] for line in lines if "scaling Deployment(" in line]


class Engines:
    """What the front says of its engines: when each was ready, and when it had its first request, by time.monotonic."""

    def __init__(self, url: str) -> None:
        self.ready_s: dict[str, float] = {}
        self.used_s: dict[str, float] = {}
        self.count = 0
        self._client = httpx.AsyncClient(base_url=url, timeout=20, trust_env=False)

    async def watch(self) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError, KeyError):
                engines = (await self._client.get("/props")).json()["engines"]
                ready = [each for each in engines if each["phase"] == "ready"]
                self.count, now_s = len(engines), time.monotonic()
                for each in ready:
                    self.ready_s.setdefault(each["id"], now_s)
                    if each["streams"]:
                        self.used_s.setdefault(each["id"], now_s)
            await asyncio.sleep(0.1)


async def run(cluster: ElasticCluster) -> dict[str, Any]:
    url = f"http://127.0.0.1:{cluster.port}"
    engines = Engines(url)
    watching = asyncio.create_task(engines.watch())
    await until_true("an engine", lambda: engines.count == 1, 240)
    requests = asks(NUM_STREAMS, "demo", 100, kinds=KINDS)
    many, few = Streams(url, requests, NUM_STREAMS - NUM_LEFT), Streams(url, requests, NUM_LEFT)
    began_s = time.monotonic()
    await few.learn()
    many.expected = few.expected
    many.start()
    few.start()
    await until_true("four engines", lambda: engines.count == MAX_ENGINES, 300)
    up_s = time.monotonic() - began_s
    await asyncio.sleep(20)
    await many.stop()
    began_s = time.monotonic()
    await until_true("one engine", lambda: engines.count == 1, 300)
    down_s = time.monotonic() - began_s
    await few.stop()
    watching.cancel()
    new = list(engines.ready_s)[1:]
    return {
        "four_engines_after_s": round(up_s, 1),
        "one_engine_after_s": round(down_s, 1),
        "delay_s": DOWNSCALE_DELAY_S,
        "first_request_after_ready_s": [
            round(engines.used_s.get(each, 1e9) - engines.ready_s[each], 2) for each in new
        ],
        "decisions": cluster.decisions(),
        "answers": many.num_answers + few.num_answers,
        "failed": [*many.lost, *few.lost],
        "different": [*many.differing, *few.differing],
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="e-", ignore_cleanup_errors=True) as directory:
        cluster = ElasticCluster(Path(directory))
        try:
            cluster.start()
            cluster.deploy()
            seen = asyncio.run(run(cluster))
        except BaseException:
            logs = Path(directory) / "ray" / "session_latest" / "logs"
            for log in [*Path(directory).glob("node-*"), logs / "monitor.log", *logs.glob("serve/controller*.log")]:
                print(log, log.read_text(errors="replace")[-3000:], sep="\n", file=sys.stderr)
            raise
        finally:
            cluster.end()
        print("SEEN " + json.dumps(seen))


if __name__ == "__main__":
    main()
