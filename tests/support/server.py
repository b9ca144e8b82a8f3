"""Starts a server as a user does, by `llama-ray up CONFIG` or by `serve run`, on a free port, and ends it."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import yaml

from benchmarks.harness.programs import free_port
from deployments.local.console import LOG_DIR_VARIABLE
from tests.conftest import GOLDEN
from tests.support import http
from tests.support.http import samples
from tests.support.programs import REPOSITORY, environment

TEST_MARK = "LLAMA_TEST_MARK"
API_KEYS_VARIABLE = "LLAMA_API_KEYS"
GOLDEN_ARGS = {
    "model_id": "golden",
    "ckpt_dir": str(GOLDEN / "mp1"),  # one shard on two ranks
    "tokenizer_path": str(GOLDEN / "mp1" / "tokenizer.model"),
    "max_seq_len": 1024,
    "dtype": "float32",
}
UP = [sys.executable, "-m", "cli", "up"]
SERVE_RUN = [str(Path(sys.executable).parent / "serve"), "run"]
# Ray guards its cluster by a token in the user's home. With an explicit address the token must be enabled.
WITH_TOKEN = {"RAY_AUTH_MODE": "token"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LISTEN = "0A"  # the state of a socket in /proc/net/tcp


class Server:
    """One running server: its URL, its output so far, and its processes."""

    def __init__(
        self,
        command: list[str],
        directory: Path,
        args: dict[str, Any],
        env: dict[str, str],
        applications: list[dict[str, Any]] | None = None,
        cwd: Path = REPOSITORY,
    ) -> None:
        """args: of the application of serve_config.yaml. applications: others in place of it."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        config = yaml.safe_load((REPOSITORY / "serve_config.yaml").read_text())
        config["http_options"]["port"] = self.port
        config["applications"][0]["args"] |= args
        config["applications"] = applications or config["applications"]
        self.config = directory / "serve_config.yaml"
        self.config.write_text(yaml.safe_dump(config))
        self.terminal = directory / "terminal"
        self.logs = directory / "logs"
        key = env.get(API_KEYS_VARIABLE, "").partition(",")[0]
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._mark = uuid.uuid4().hex
        with self.terminal.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, str(self.config)],
                cwd=cwd,
                # A separate Ray cluster, also while another one runs.
                env=environment(
                    **{TEST_MARK: self._mark, "RAY_ADDRESS": "local", LOG_DIR_VARIABLE: str(self.logs)} | env
                ),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        """The output on the terminal, followed by the lines of Ray and Serve from the log file."""
        files = [self.terminal, *sorted(self.logs.glob("*.log"))]
        return "\n".join(file.read_text(errors="replace") for file in files)

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON body; status 0 while nothing answers, or not with a whole answer. Sends the first API key."""
        try:
            response = http.get(self.url + path, headers=self.headers, timeout=60)
        except httpx.HTTPError:
            return 0, {}
        return response.status_code, response.json() if response.content.startswith(b"{") else {}

    def wait_ready(self, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.get("/ready")[0] != 200:
            assert self.process.poll() is None, "the command ended:\n" + self.output()[-3000:]
            assert time.monotonic() < deadline, f"not ready within {timeout_s:g} s:\n" + self.output()[-3000:]
            time.sleep(0.2)

    def processes(self) -> dict[int, str]:
        """Every process that was started from this server and still runs: pid -> command line."""
        return marked_processes(self._mark)

    def listening(self) -> dict[str, str]:
        """The TCP sockets on which its processes listen: address and port, as the kernel lists them -> command line."""
        owners: dict[str, str] = {}
        for pid, command in self.processes().items():
            with contextlib.suppress(OSError):
                for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        owners[os.readlink(descriptor)] = command
        found = {}
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and (owner := f"socket:[{fields[9]}]") in owners:
                    found[fields[1]] = owners[owner]
        return found

    def end(self) -> None:
        """End the server by SIGTERM. Processes that outlive it are killed, and the test fails."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(120)
        left = outlived = self.wait_gone()
        deadline = time.monotonic() + 30
        while left and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
            left = self.processes()
        assert not outlived, outlived

    def wait_gone(self, timeout_s: float = 60.0) -> dict[int, str]:
        """Wait until all processes are gone, at most `timeout_s`. Returns those that are left."""
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


def marked_processes(mark: str) -> dict[int, str]:
    """The running processes that have TEST_MARK=mark in their environment: pid -> command line."""
    wanted, found = f"{TEST_MARK}={mark}".encode(), {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return found


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def address_of(server: Server) -> str:
    """The Ray address of a server's own cluster."""
    return option_of(server, "--gcs-address=")


def option_of(server: Server, option: str) -> str:
    """The value of an option of Ray's own processes, from the command line of the first one that has it."""
    for pid in server.processes():
        words: list[str] = []
        with contextlib.suppress(OSError):  # it has just ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        for word in words:
            if word.startswith(option):
                return word.removeprefix(option)
    raise AssertionError("the server's cluster was not found")


def is_idle(server: Server) -> bool:
    """Whether no request runs or waits and no cache block is in use."""
    status, props = server.get("/props")
    return status == 200 and not (props["requests_running"] or props["requests_waiting"] or props["blocks_used"])


def num_generated(server: Server) -> float:
    """Tokens that the server has generated in all."""
    return samples(http.get(server.url + "/metrics", timeout=60).content)["llama_generation_tokens_total"]


@contextlib.contextmanager
def served(
    *,
    command: list[str] | None = None,
    args: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    applications: list[dict[str, Any]] | None = None,
    cwd: Path = REPOSITORY,
) -> Iterator[Server]:
    """A started server that may not be ready yet. It ends with the context."""
    with tempfile.TemporaryDirectory() as directory:
        command = command or UP
        started = Server(command, Path(directory), args or {}, env or {}, applications, cwd)
        try:
            yield started
        finally:
            started.end()


# HTTP over plain sockets, for clients that violate the protocol and for many clients at little cost


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        """The error of an answer in OpenAI's shape."""
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and b"Traceback" not in self.body
        return error

    def events(self) -> list[dict[str, Any]]:
        """The chunks of a complete stream, which ends with one [DONE]."""
        events = [line[6:] for line in self.body.split(b"\n\n") if line.startswith(b"data: ")]
        assert events and events[-1] == b"[DONE]" and events.count(b"[DONE]") == 1, self.body[-300:]
        return [json.loads(event) for event in events[:-1]]


def message(path: str, body: bytes | dict[str, Any], *headers: str, length: int | None = None) -> bytes:
    """A POST request. `length` replaces the true Content-Length."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    has_type = any(header.lower().startswith("content-type") for header in headers)
    given = (*(() if has_type else ("Content-Type: application/json",)), *headers)
    size = len(raw) if length is None else length
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {size}", *given]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + raw


def connect(server: Server, *, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(120)  # for whole answers, on a machine that other tests share
    connection.connect(("127.0.0.1", server.port))
    return connection


async def ask(server: Server, request: bytes, patience_s: float = 120.0) -> Answer:
    """The answer to a request, sent over a new connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**24)
    try:
        async with asyncio.timeout(patience_s):
            writer.write(request)
            return await read_answer(reader)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)}
    body = b""
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
    return Answer(int(lines[0].split()[1]), headers, body)


def num_descriptors(server: Server) -> int:
    """Open files of the processes that handle HTTP."""
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in _http_processes(server))


def resident_bytes(server: Server) -> int:
    """Resident memory of the processes that handle HTTP."""
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in _http_processes(server)]
    return sum(1024 * int(status.split("VmRSS:")[1].split()[0]) for status in statuses)


def _http_processes(server: Server) -> list[int]:
    names = ("/haproxy ", "ProxyActor", "ServeReplica")
    return [pid for pid, command in server.processes().items() if any(name in command for name in names)]
