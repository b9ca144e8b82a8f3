"""Run by test_remote_cluster.py as a program: a remote model on a cluster of three nodes, each with a cache of its own.

Prints its observations as one line of JSON. A download is damaged, a node is lost under live streams, and another one joins
with an empty cache.
"""

import asyncio
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import uvloop
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group

from cluster.driver.group_info import GroupLimits
from cluster.driver.standby import StandbyPool
from deployments.args import ServerArgs, resolve
from deployments.engine import supervisor
from deployments.engine.service import LlamaService
from deployments.fleet.own_engine import OwnEngine
from llama_core import Llama
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support import hugging_face
from tests.support.fake_hub import FakeHub
from tests.support.ray_nodes import few_processes
from tests.support.requests import submit
from tests.support.waiting import until_true

REPO, WEIGHTS = "lab/tiny", "model.safetensors"
BUNDLES = [{"memory": 2**20}, {"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0}]
NUM_TOKENS = 48
OPTIONS = {"max_seq_len": 256, "backend": "torch", "dtype": "float32"}


def publish(folder: Path) -> Path:
    """A model with the demo's tokenizer, of 6 MB."""
    config = hugging_face.CONFIGS["llama2"] | {"vocab_size": 1280, "hidden_size": 256, "num_attention_heads": 16}
    hugging_face.write(folder, config, hugging_face.random_weights(hugging_face.read(config, 1280)), 1)
    (folder / "tokenizer.model").write_bytes((resolve("demo") / "tokenizer.model").read_bytes())
    return folder


def prompt(number: int) -> list[int]:
    return [1, 5 + number, 9]


async def read(front: OwnEngine, number: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [token async for delta in submit(front, prompt(number), params) for token in delta.tokens]


async def main(cluster: Cluster, hub: FakeHub, folder: Path, home: Path, last: Any) -> dict[str, object]:
    seen: dict[str, object] = {}
    llama = Llama.build(folder, max_batch_size=1, **OPTIONS)  # type: ignore[arg-type]
    prompts = [prompt(number) for number in range(4)]
    by_path, _ = llama.generate(prompts, max_gen_len=NUM_TOKENS, temperature=0.0)  # to the first stop token
    del llama
    placement = placement_group(BUNDLES, strategy="PACK")
    await asyncio.wait_for(placement.ready(), 120)
    args = ServerArgs(ckpt_dir=REPO, model_parallel_size=3, shrink_after_s=3.0, **OPTIONS).pinned()
    size = (folder / WEIGHTS).stat().st_size
    limits = GroupLimits(start_timeout_s=180, step_timeout_s=20)
    pool = StandbyPool(placement, limits, enabled=False, downloads=args.downloads)
    vars(supervisor)["ROOM_CHECK_S"] = 1.0
    service = LlamaService(args, pool)
    seen["headers"] = hub.bytes_served[WEIGHTS] / size
    front = OwnEngine(service, args)
    hub.damage(WEIGHTS)
    hub.bytes_per_s = 3e6
    starting = asyncio.create_task(front.start())
    await until_true("the ranks fetch", lambda: service.readiness().phase == "fetching" or starting.done(), 120)
    seen["fetching"] = service.describe().detail
    await starting
    try:
        files = await asyncio.to_thread(lambda: list(home.rglob(f"snapshots/*/{WEIGHTS}")))
        seen["caches"] = sorted(file.parents[4].name for file in files)
        seen["fetched"] = hub.bytes_served[WEIGHTS] / size
        seen["checkpoint"] = service.describe().checkpoint
        assert service.info is not None
        seen["nodes"] = len({identity.node_id for identity in service.info.identities})
        wanted = [await read(front, number) for number in range(4)]
        seen["same"] = [tokens[: len(own)] for tokens, own in zip(wanted, by_path, strict=True)] == by_path
        await asyncio.to_thread(lambda: cluster.remove_node(last, allow_graceful=False))
        await until_true(
            "two ranks serve", lambda: service.describe().world_size == 2 and service.readiness().ready, 180
        )
        seen["same_shrunk"] = [await read(front, number) for number in range(4)] == wanted
        cluster.add_node(num_cpus=1, env_vars=hub.environment(home / "joined"))
        served: list[bool] = []
        while service.describe().world_size != 3 or not service.readiness().ready:
            served.append(await read(front, len(served) % 4) == wanted[len(served) % 4])
        seen["same_grown"] = all(served) and len(served) > 0
        seen["fetched_at_last"] = hub.bytes_served[WEIGHTS] / size
    finally:
        await front.stop()
    return seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, FakeHub() as hub, few_processes():
        home = Path(name)
        hub.add(REPO, publish(home / "published"))
        os.environ |= hub.environment(home / "head") | {"LLAMA_CACHE_DIR": str(home / "cache")}
        checks = {
            "health_check_period_ms": 1000,
            "health_check_timeout_ms": 10_000,
            "health_check_failure_threshold": 6,
        }
        head = {"num_cpus": 1, "include_dashboard": False, "_system_config": checks}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1, env_vars=hub.environment(home / "second"))
        last = cluster.add_node(num_cpus=1, env_vars=hub.environment(home / "third"))
        ray.init(address=cluster.address, logging_level=logging.WARNING, log_to_driver=False)
        try:
            print("SEEN " + json.dumps(uvloop.run(main(cluster, hub, home / "published", home, last))))
        finally:
            ray.shutdown()
            cluster.shutdown()
