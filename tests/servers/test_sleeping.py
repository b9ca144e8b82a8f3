"""A model that nobody uses has no engine, is listed, and wakes for a request."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server import Server, served
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

ARGS = {"model_id": "sleeper", "ckpt_dir": "demo", "model_parallel_size": 1, "cpus_per_rank": 0.3, "spare_ranks": False}
SCALING = {
    "min_replicas": 0,
    "max_replicas": 2,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 3.0,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 1.0,
    "policy": {
        "policy_function": "deployments.fleet.scaling:ExpectedTime",
        "policy_kwargs": {"ttft_s": 5.0, "utilization": 0.8},
    },
}
ASK = {"model": "sleeper", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    engine: dict[str, Any] = {"name": "sleeper", "route_prefix": None, "args": ARGS}
    engine |= {"import_path": "deployments.app:build_engine"}
    engine |= {"deployments": [{"name": "LlamaEngine", "autoscaling_config": SCALING}]}
    front = {"name": "llama", "route_prefix": "/", "import_path": "deployments.app:build_ingress", "args": {}}
    with served(applications=[front, engine]) as server:
        server.wait_ready()
        yield server


def statuses(server: Server) -> dict[str, str]:
    return {model["id"]: model["status"] for model in server.get("/v1/models")[1]["data"]}


def engines(server: Server) -> int:
    return sum(command.startswith("ray::ServeReplica:sleeper:") for command in server.processes().values())


async def burst(server: Server) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        asks: list[Any] = [ASK | {"stream": i % 2 == 0} for i in range(8)]
        return await asyncio.gather(*(client.post("/v1/completions", json=ask) for ask in asks))


def test_a_model_sleeps_is_listed_and_wakes_for_a_burst_again_and_again(server: Server) -> None:
    texts = set()
    for _ in range(2):
        wait_until("the model sleeps", lambda: statuses(server) == {"sleeper": "sleeping"} and not engines(server), 60)
        assert server.get("/ready")[0] == 200
        answers = asyncio.run(burst(server))
        assert [answer.status_code for answer in answers] == [200] * 8
        assert all("[DONE]" in answer.text for answer in answers[::2])
        texts |= {answer.json()["choices"][0]["text"] for answer in answers[1::2]}
        assert engines(server) == 1 and statuses(server) == {"sleeper": "ready"}
    assert len(texts) == 1
