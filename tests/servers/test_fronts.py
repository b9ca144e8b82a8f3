"""A front and two models, each in an application of its own, on one node."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from deployments.args import resolve
from tests.chaos.asks import TOOL
from tests.conftest import GOLDEN
from tests.servers.conftest import ADMIN_KEY
from tests.support import adapters
from tests.support.programs import REPOSITORY, environment
from tests.support.server import WITH_TOKEN, Server, address_of, openai_client, served
from tests.support.waiting import until_true, wait_until

pytestmark = pytest.mark.timeout(900)

SMALL = {"model_parallel_size": 1, "max_seq_len": 1024, "cpus_per_rank": 0.3, "spare_ranks": False}
DEMO = SMALL | {"model_id": "llama-demo", "ckpt_dir": "demo"}
GOLDEN_MODEL = SMALL | {"model_id": "golden", "ckpt_dir": str(GOLDEN / "mp1"), "dtype": "float32"}
LOOPBACK = ("0100007F:", "0000000000000000FFFF00000100007F:")
LONG = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 900, "ignore_eos": True}
# Calls the application's handle as another Ray application does.
CALLS = """
import json, sys
import ray
from ray import serve

ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, logging_level="ERROR")
handle = serve.get_app_handle("llama")
for model in ("llama-demo", "golden"):
    own = handle.options(multiplexed_model_id=model)
    whole = own.text_completion.remote(["Once upon a time"], 0.0, max_gen_len=8).result()[0]["generation"]
    parts = own.options(stream=True).stream.remote("Once upon a time", 0.0, max_gen_len=8)
    print(json.dumps([whole, "".join(part["generation"] for part in parts)]))
"""


def engine(args: dict[str, Any], num_replicas: int) -> dict[str, Any]:
    return {
        "name": args["model_id"],
        "route_prefix": None,
        "import_path": "deployments.app:build_engine",
        "args": args,
        "deployments": [{"name": "LlamaEngine", "num_replicas": num_replicas}],
    }


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("adapters")
    adapters.write(root / "poet", resolve("demo"), adapters.SHAPES["all"])
    ingress = {"name": "llama", "route_prefix": "/", "import_path": "deployments.app:build_ingress", "args": {}}
    demo = DEMO | {"lora_root": str(root)}
    with served(
        applications=[ingress, engine(demo, 2), engine(GOLDEN_MODEL, 1)], env={"LLAMA_ADMIN_KEYS": ADMIN_KEY}
    ) as server:
        server.wait_ready()
        wait_until("three engines", lambda: len(server.get("/props")[1].get("engines", ())) == 3)
        yield server


def engine_processes(server: Server, application: str) -> list[int]:
    name = f"ray::ServeReplica:{application}:LlamaEngine"
    return [pid for pid, command in server.processes().items() if command.startswith(name)]


def haproxy_processes(server: Server) -> set[int]:
    return {pid for pid, command in server.processes().items() if "haproxy" in command and " -f " in command}


def test_each_model_is_served_by_its_name(fronts: Server) -> None:
    client = openai_client(fronts)
    assert {model.id for model in client.models.list()} == {"llama-demo", "golden"}
    texts = {
        name: client.completions.create(model=name, prompt="Once upon a time", temperature=0, max_tokens=8)
        for name in ("llama-demo", "golden")
    }
    assert {name: answer.model for name, answer in texts.items()} == {name: name for name in texts}
    assert len({answer.choices[0].text for answer in texts.values()}) == 2
    with pytest.raises(openai.NotFoundError, match="those served are"):
        client.completions.create(model="another", prompt="Once")


def test_calls_by_handle_choose_a_model_and_stream(fronts: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLS, address_of(fronts)],
        cwd=REPOSITORY,
        env=environment(**WITH_TOKEN),
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    demo, golden = map(json.loads, done.stdout.splitlines())
    assert demo[0] == demo[1] != golden[0] == golden[1]


def test_the_ports_of_an_engine_serve_nothing(fronts: Server) -> None:
    """Serve's own HTTP server is a socket in a private folder; the engine's port for fronts speaks TLS with its own key."""
    listening = fronts.listening()
    ports = [int(at.partition(":")[2], 16) for at, command in listening.items() if ":LlamaEngine" in command]
    statuses = []
    for port in ports:
        for path in ("/v1/models", "/props", "/"):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as answer:
                    statuses.append(answer.status)
            except urllib.error.HTTPError as error:
                statuses.append(error.code)
            except (OSError, http.client.HTTPException):
                pass  # no HTTP
    assert ports and not statuses


def test_every_port_of_a_small_cluster_is_on_loopback(fronts: Server) -> None:
    others = {at: command for at, command in fronts.listening().items() if not at.startswith(LOOPBACK)}
    assert not others


async def text_of(client: httpx.AsyncClient, model: str) -> str:
    answer = (await client.post("/v1/completions", json=LONG | {"model": model})).raise_for_status().json()
    return str(answer["choices"][0]["text"])


async def begin_streams(client: httpx.AsyncClient, model: str) -> list[asyncio.Task[str]]:
    """Four, which have begun. Their texts."""

    async def stream(heard: asyncio.Event) -> str:
        text = ""
        async with client.stream("POST", "/v1/completions", json=LONG | {"model": model, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    heard.set()
        return text

    heard = [asyncio.Event() for _ in range(4)]
    streams = [asyncio.create_task(stream(event)) for event in heard]
    await asyncio.gather(*(event.wait() for event in heard))
    return streams


async def test_streams_survive_the_death_of_their_engine_and_the_metrics_name_its_successor(fronts: Server) -> None:
    async with httpx.AsyncClient(base_url=fronts.url, timeout=120) as client:
        whole = await text_of(client, "llama-demo")

        proxies = haproxy_processes(fronts)
        before = {each["id"] for each in fronts.get("/props")[1]["engines"]}
        streams = await begin_streams(client, "llama-demo")
        for pid in engine_processes(fronts, "llama-demo"):  # none is left to continue: the front holds the streams
            os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*streams) == [whole] * 4

        def names() -> set[str]:
            return {each["id"] for each in fronts.get("/props")[1]["engines"]}

        # One is of the other model.
        await until_true("another two engines", lambda: len(names()) == 3 and len(names() & before) == 1)
        assert haproxy_processes(fronts) == proxies, (
            "HAProxy knows fronts only: engines that come and go do not reload it"
        )
        metrics = (await client.get("/metrics")).text
        assert all(f'engine="{name}"' in metrics for name in names())
        assert not any(f'engine="{name}"' in metrics for name in before - names())


async def test_a_loaded_adapter_survives_its_engines_and_its_streams_survive_its_unloading(fronts: Server) -> None:
    async with httpx.AsyncClient(base_url=fronts.url, timeout=120) as client:

        async def change(call: str) -> None:
            body = {"lora_name": "demo-poet", "lora_path": "poet", "base_model_name": "llama-demo"}
            key = {"Authorization": f"Bearer {ADMIN_KEY}"}
            (await client.post(f"/v1/{call}_lora_adapter", json=body, headers=key)).raise_for_status()

        await change("load")
        models = {each["id"]: each["parent"] for each in (await client.get("/v1/models")).json()["data"]}
        assert models == {"llama-demo": None, "golden": None, "demo-poet": "llama-demo"}
        whole = await text_of(client, "demo-poet")
        assert whole != await text_of(client, "llama-demo")
        streams = await begin_streams(client, "demo-poet")
        for pid in engine_processes(fronts, "llama-demo"):
            os.kill(pid, signal.SIGKILL)
        assert await asyncio.gather(*streams) == [whole] * 4
        (front,) = (pid for pid, command in fronts.processes().items() if "ServeReplica:llama:LlamaIngress" in command)
        os.kill(front, signal.SIGKILL)
        await until_true("another front knows it", lambda: "demo-poet" in str(fronts.get("/v1/models")[1]))
        chat = {"model": "demo-poet", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
        tools = {"tools": [TOOL], "tool_choice": "required", "temperature": 0}
        called = (await client.post("/v1/chat/completions", json=chat | tools)).raise_for_status().json()
        assert called["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "play"
        streams = await begin_streams(client, "demo-poet")
        await change("unload")
        refused = await client.post("/v1/completions", json=LONG | {"model": "demo-poet"})
        assert refused.status_code == 404
        assert await asyncio.gather(*streams) == [whole] * 4
