"""A whole server as a user starts it: many streams, a killed rank, a slow rank, and a clean end."""

import asyncio
import contextlib
import getpass
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deployments.local.small_cluster import OBJECT_STORE_BYTES
from tests.support import http
from tests.support.server import COMPLETIONS, Server, connect, is_idle, message, num_generated, option_of
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.timeout(600)

READ_AFTER_S = 15.0  # half of the time after which a client that reads nothing is disconnected


# Both servers.


@pytest.mark.parametrize("server", ["demo", "plain"], ids=["through HAProxy", "through Serve's proxy"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_disconnected_client_frees_its_sequence(server: str, stream: bool, request: pytest.FixtureRequest) -> None:
    running: Server = request.getfixturevalue(server)
    limit = running.get("/v1/models")[1]["data"][0]["max_model_len"] - 20
    body = {"prompt": "Once upon a time", "max_tokens": limit, "ignore_eos": True, "temperature": 1.5, "stream": stream}

    def num_generated_without_client() -> float:
        """Tokens that the server generates for a client that leaves at once."""
        before = num_generated(running)
        with httpx.Client() as leaving:
            if stream:
                with leaving.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
                    next(answer.iter_lines())
            else:
                with contextlib.suppress(httpx.ReadTimeout):  # a client that pauses may get the whole answer
                    leaving.post(f"{running.url}/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.02))
        wait_until("the server is idle", lambda: is_idle(running))
        return num_generated(running) - before

    counts: list[float] = []
    while not counts or min(counts) >= limit * 0.75:
        # On a busy machine the server may be done before it can notice, but not each time.
        assert len(counts) < 10, f"{counts} tokens of {limit} were generated without a client"
        counts.append(num_generated_without_client())


# The last test of the first server ends it here, because an idle server takes an eighth of a core.


def test_sigterm_of_serve_run_leaves_no_process(plain: Server) -> None:
    """The context `served` also ends a server by SIGTERM and fails if a process is left."""
    assert len(plain.processes()) > 5
    plain.process.send_signal(signal.SIGTERM)
    plain.process.wait(180)
    assert plain.wait_gone() == {}
    assert plain.get("/health")[0] == 0


# The demo model by `make serve`'s command.


def test_nothing_listens_beyond_loopback(demo: Server) -> None:
    """HTTP, HAProxy's statistics, Ray's processes, Serve's gRPC, the ranks' store."""
    http.post(f"{demo.url}/v1/completions", json={"prompt": "hi", "max_tokens": 2}, timeout=30).raise_for_status()
    listening = demo.listening()
    commands = " ".join(listening.values())
    assert all(name in commands for name in ("gcs_server", "raylet", "haproxy", "ServeReplica", "RankWorker")), commands
    # 127.0.0.1 as an IPv4 and as an IPv6 address, as the kernel writes them.
    loopback = ("0100007F:", "0000000000000000FFFF00000100007F:")
    assert {at: command for at, command in listening.items() if not at.startswith(loopback)} == {}


def test_the_cluster_has_no_dashboard_no_autoscaler_and_little_memory_for_objects(demo: Server) -> None:
    commands = demo.processes().values()
    programs = ("gcs_server", "raylet/raylet", "/log_monitor.py", "/monitor.py", "dashboard/dashboard.py")
    assert [sum(program in command for command in commands) for program in programs] == [1, 1, 1, 0, 0]
    assert option_of(demo, "--object_store_memory=") == str(OBJECT_STORE_BYTES)


AS_NOBODY = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
os.rename(sys.argv[1], sys.argv[1] + ".moved")
"""


def test_another_user_cannot_put_a_socket_in_the_place_of_the_raylets(demo: Server) -> None:
    socket = Path(option_of(demo, "--raylet_socket_name="))
    assert socket.is_socket()
    private = [folder for folder in socket.parents if folder.owner() == getpass.getuser()]
    assert any(folder.stat().st_mode & 0o077 == 0 for folder in private), socket
    if os.getuid() == 0:
        done = subprocess.run([sys.executable, "-I", "-S", "-c", AS_NOBODY, socket], capture_output=True, check=False)
        assert b"PermissionError" in done.stderr and socket.exists(), done.stderr


@pytest.mark.parametrize("name", [b"x-request-timeout-seconds", b"x-request-id", b"x-request-disconnect-disabled"])
def test_a_header_that_is_not_utf8_is_no_server_error(demo: Server, name: bytes) -> None:
    answer = http.post(
        f"{demo.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=[(name, b"caf\xe9")]
    )
    if b"timeout" in name:
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name.decode(), answer.text
    else:
        assert answer.status_code == 200, answer.text


# The last test of this server, which ends it.


def test_the_first_ctrl_c_completes_live_streams_and_refuses_new_requests(demo: Server) -> None:
    assert demo.get("/ready")[0] == 200

    async def drained() -> tuple[str, dict[str, Any], tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]:
        async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="any", max_retries=0, timeout=180) as api:
            body: dict[str, Any] = {"model": "llama-demo", "prompt": "Once", "max_tokens": 450, "stream": True}
            live = await api.completions.create(**body, extra_body={"ignore_eos": True})
            await anext(aiter(live))
            demo.process.send_signal(signal.SIGINT)

            async def not_ready() -> tuple[int, dict[str, Any]] | None:
                answer = await asyncio.to_thread(demo.get, "/ready")
                return answer if answer[0] != 200 else None

            ready = await until("the server is not ready any more", not_ready, pause_s=0)
            health = await asyncio.to_thread(demo.get, "/health")
            refused: dict[str, Any] = {}
            try:
                await api.completions.create(model="llama-demo", prompt="x", max_tokens=1)
            except openai.APIStatusError as error:
                refused = {
                    "status": error.status_code,
                    "after": error.response.headers["retry-after"],
                    "code": error.code,
                }
            reason = ""
            async for chunk in live:
                reason = chunk.choices[0].finish_reason or reason
            return reason, refused, ready, health

    # A client that reads late an answer which is larger than the kernel's buffers, but before it would be disconnected.
    late = connect(demo)
    body = {"prompt": "Once", "n": 32, "max_tokens": 450, "logprobs": 20, "ignore_eos": True, "stream": True}
    late.sendall(message(COMPLETIONS, body | {"temperature": 1.5}))
    wait_until("the late client's request runs", lambda: demo.get("/props")[1].get("requests_running"), pause_s=0.01)
    with ThreadPoolExecutor(1) as pool:
        live_has_ended = threading.Event()

        def read_late() -> tuple[int, bytes]:
            live_has_ended.wait(READ_AFTER_S)
            received, last = len(late.recv(2**20)), b""
            while piece := late.recv(2**20):
                received, last = received + len(piece), (last + piece)[-100:]
            return received, last

        reading = pool.submit(read_late)
        try:
            reason, refused, ready, health = asyncio.run(drained())
        finally:
            live_has_ended.set()
        received, last = reading.result()
    assert reason == "length", "the stream is complete"
    assert ready[0] == 503 and ready[1]["phase"] == "draining" and health[0] == 200
    assert received > 2**23 and b"data: [DONE]" in last and last.endswith(b"0\r\n\r\n")
    assert refused["status"] == 503 and refused["code"] == "not_ready" and int(refused["after"]) >= 1
    assert demo.process.wait(180) == 0
    assert "Task ServeController" not in demo.terminal.read_text(), "the terminal shows no failure at a normal end"
    assert demo.terminal.read_text().splitlines()[-1] == "Stopped"
    assert demo.wait_gone() == {}
