"""A failed and a successful update under load, with resources for a second replica; then all processes get a signal at once."""

import ast
import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch

from tests.chaos.asks import Ask
from tests.chaos.load import hear
from tests.servers.conftest import CPUS_PER_RANK, SHARED_MEMORY_BEFORE, Malicious
from tests.support.checkpoints import WIDE, random_weights, split, write
from tests.support.otlp_collector import Traced
from tests.support.programs import REPOSITORY, environment
from tests.support.server import WITH_TOKEN, Server, address_of
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.timeout(600)

ARGS = {"model_parallel_size": 1, "cpus_per_rank": CPUS_PER_RANK, "spare_ranks": False}
OPENMP = re.compile(r"__KMP_REGISTERED_LIB_(\d+)_\d+")
# Reads the arguments of an update from each line, and answers by the status of a failed one or an empty line.
DEPLOY = """
import sys
import ray
from ray import serve
from deployments.app import build_app
from deployments.args import ServerArgs

ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, logging_level="ERROR")
for line in sys.stdin:
    message = ""
    try:
        serve.run(build_app(ServerArgs(**eval(line))), name="llama", route_prefix="/")
    except RuntimeError:
        message = serve.status().applications["llama"].deployments["LlamaIngress"].message
    print("SAID", ascii(message), flush=True)
"""


@asynccontextmanager
async def operator(server: Server) -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Updates the application from another process. Returns what a failed deployment's status says, or nothing."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", DEPLOY, address_of(server)),
        cwd=REPOSITORY,
        env=environment(**WITH_TOKEN),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None and process.stdout is not None

    async def deploy(**changes: object) -> str:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{ARGS | changes!r}\n".encode())
        async with asyncio.timeout(400):
            async for line in process.stdout:
                if line.startswith(b"SAID "):
                    said: str = ast.literal_eval(line.removeprefix(b"SAID ").decode())
                    return said
        raise AssertionError("the operator's process has ended")

    try:
        yield deploy
    finally:
        process.stdin.close()
        await process.wait()


@pytest.fixture
def server(traced: Traced) -> Server:
    return traced.server


async def test_no_request_fails_during_a_failed_or_a_successful_update(server: Server, tmp_path: Path) -> None:
    damaged = write(tmp_path / "damaged", split(random_weights(WIDE), 2))
    torch.save({"norm.weight": Malicious(tmp_path / "sprung")}, damaged / "consolidated.01.pth")  # only a rank reads it
    files = {"ckpt_dir": str(damaged), "tokenizer_path": str(damaged / "tokenizer.model"), "max_seq_len": 64}
    stopping, errors, num_answers = asyncio.Event(), [], 0

    async def ask_on(client: httpx.AsyncClient, number: int) -> None:
        nonlocal num_answers
        body = {"model": "llama-demo", "prompt": f"story {number}", "max_tokens": 200, "stream": True}
        while not stopping.is_set():
            heard = await hear(client, Ask("greedy", "/v1/completions", body | {"ignore_eos": True}))
            num_answers += 1
            if heard.error is not None or not heard.done:
                errors.append(heard.error)
            await asyncio.sleep(1.5)  # leaves processor time to the replica that starts

    async with (
        operator(server) as deploy,
        httpx.AsyncClient(base_url=server.url, timeout=180, trust_env=False, headers=server.headers) as client,
    ):
        asking = [asyncio.create_task(ask_on(client, number)) for number in range(2)]
        said = await deploy(max_queue=101, **files)
        assert "damaged/consolidated.01.pth" in said, said
        answered = num_answers
        assert server.get("/props")[1]["max_queue"] == 256 and server.get("/ready")[0] == 200, "the old one serves"
        assert not (tmp_path / "sprung").exists(), "the pickle was executed"
        assert await deploy(max_queue=102) == ""

        async def is_updated() -> bool:
            return bool((await client.get("/props")).json().get("max_queue") == 102)

        await until("the updated replica answers", is_updated)
        stopping.set()
        await asyncio.gather(*asking)
    assert not errors
    assert answered > 3 and num_answers > answered + 3


def test_a_signal_to_the_process_group_ends_every_process(server: Server) -> None:
    """systemd ends a service in this way: Ray's own processes get the signal too, so no stream can drain."""
    pids = server.processes().keys()
    os.killpg(server.process.pid, signal.SIGTERM)
    assert server.process.wait(120) == 0
    assert "Ray has ended too" in server.output(), "the command does not wait for Ray's raylet"
    assert not server.wait_gone()

    def left() -> set[str]:
        """New shared memory. Live processes of other tests register their OpenMP threads there, by pid."""
        new = set(os.listdir("/dev/shm")) - SHARED_MEMORY_BEFORE
        return {name for name in new if not (found := OPENMP.fullmatch(name)) or int(found[1]) in pids}

    wait_until("the shared memory of the killed ranks is gone", lambda: not left())
