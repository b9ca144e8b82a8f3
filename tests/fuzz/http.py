"""Sends generated requests, many at once, and judges each answer. After each batch the server must be in its idle state."""

import asyncio
from collections.abc import Iterator
from typing import Protocol

import h11
import httpx

from deployments.http.app import build_http_app
from deployments.http.request_id import TIMEOUT_HEADER
from deployments.observe.metrics import Metrics
from deployments.openai.errors import is_anthropic
from tests.fuzz.messages import GENERATION, MARK, Message, cheap, made
from tests.fuzz.outcome import Outcome
from tests.support.scripted_engine import FakeEngine, FakeStream
from tests.support.server import Server, served

CONCURRENCY = 16
TIMEOUT_S = 120.0  # of one answer; the longest takes a fraction of a second on an idle machine
MOST_ERROR_BYTES = 1000
REFUSALS = {400, 403, 404, 405, 408, 413, 415, 429}
LEAKS = (MARK, "Traceback", "pydantic", 'File "', "site-packages")
# The answers of HAProxy and of uvicorn to what they cannot parse; such requests never reach the application.
NOT_HTTP = ("<html><body><h1>400 Bad request</h1>", "Invalid HTTP request received.")
_SETTLE_S = 60.0


class Watched(Protocol):
    """The fuzzed server: its client, and its state, which must not change."""

    client: httpx.AsyncClient

    async def state(self) -> dict[str, object]:
        """Processes, epoch, blocks in use, requests: the same whenever the server is idle."""


class InProcess:
    """The application in this process, over the scripted engine."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        transport = httpx.ASGITransport(build_http_app(self.engine, Metrics(in_ray=False)))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    async def state(self) -> dict[str, object]:
        open_streams: list[FakeStream] = [stream for stream in self.engine.streams if not stream.ended]
        self.engine.streams = open_streams
        return {"open": len(open_streams), "alive": self.engine.live()}


class OverHttp:
    """A server as users start it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
        self.client = httpx.AsyncClient(base_url=server.url, limits=limits, timeout=TIMEOUT_S, trust_env=False)

    async def state(self) -> dict[str, object]:
        props = (await self.client.get("/props")).json()
        names = ("epoch", "phase", "blocks_used", "requests_running", "requests_waiting")
        processes = await asyncio.to_thread(self.server.processes)
        replicas = sorted(pid for pid, command in processes.items() if "ServeReplica" in command)
        ranks = [rank["pid"] for rank in props["ranks"]]
        return {name: props[name] for name in names} | {"ranks": ranks, "replicas": replicas}


def _judge_anthropic_error(answer: httpx.Response) -> str | None:
    try:
        body = answer.json()
        is_usual = set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}
        texts = [body["type"], body["request_id"], *body["error"].values()]
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"status {answer.status_code} without an error object"
    return None if is_usual and all(isinstance(text, str) and text for text in texts) else "an error of another shape"


def judge(message: Message, answer: httpx.Response) -> str | None:
    """The fault of the answer; None if there is none."""
    status, text = answer.status_code, answer.text
    if status < 400:
        return _judge_success(message, answer)
    if status >= 500 and not (status == 504 and message.has(TIMEOUT_HEADER.encode())):
        return f"status {status}"
    if status not in REFUSALS | {504}:
        return f"status {status} is not documented"
    if leak := next((leak for leak in LEAKS if leak in text), None):
        return f"{leak!r} in an error"
    if len(answer.content) > MOST_ERROR_BYTES:
        return f"an error of {len(answer.content)} bytes"
    if message.method == "HEAD":
        return None
    if is_anthropic({"path": message.path.partition("?")[0]}):
        return _judge_anthropic_error(answer)
    try:
        body = answer.json()
        error = body["error"]
        is_usual = set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
    except (ValueError, TypeError, KeyError):
        return f"status {status} without an error object"
    is_usual = is_usual and all(isinstance(error[name], str) and error[name] for name in ("message", "type", "code"))
    if not is_usual or not isinstance(error["param"], str | None):
        return "an error of another shape"
    return None


def _judge_success(message: Message, answer: httpx.Response) -> str | None:
    if message.path not in GENERATION or answer.status_code != 200:
        return None
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
        is_whole = bool(events) and (events[-1] == "data: [DONE]" or '"error"' in events[-1])
        return None if is_whole else "a stream without an end"
    return None if answer.json().get("choices") else "an answer without choices"


async def fuzz(watched: Watched, cases: int, seed: int, outcome: Outcome) -> None:
    """Sends every message once. After every batch the canary request gets its first answer again, and the state is idle."""
    expected, idle = await canary(watched.client), await settled(watched, None)
    for batch in made(cases, seed):
        waiting = iter(batch)
        await asyncio.gather(*(_send_each(watched.client, waiting, outcome) for _ in range(CONCURRENCY)))
        try:
            if (answer := await canary(watched.client)) != expected:
                outcome.found(f"the canary request got {answer!r}, not {expected!r}, after {batch[-1]}")
            if (now := await settled(watched, idle)) != idle:
                outcome.found(f"the state {idle} became {now} after {batch[-1]}")
                idle = now
        except httpx.HTTPError as error:
            outcome.found(f"the canary request failed ({type(error).__name__}) after {batch[-1]}")
            return
    outcome.extra["state"] = {"before and after": idle}


async def _send_each(client: httpx.AsyncClient, messages: Iterator[Message], outcome: Outcome) -> None:
    for message in messages:
        content = cheap(message.path, message.body)
        url = client.base_url.copy_with(raw_path=message.path.encode("latin-1", "replace"))
        try:
            request = client.build_request(message.method, url, content=content, headers=list(message.headers))
            answer = await client.send(request)
        except (httpx.LocalProtocolError, h11.LocalProtocolError):
            outcome.case("no HTTP")  # the client cannot send it
            continue
        except Exception as error:  # the application's own, when it runs in this process
            outcome.case(type(error).__name__)
            if not _closed_on_purpose(message, error):
                outcome.found(f"{type(error).__name__}: {error}: {message}")
            continue
        if answer.status_code == 400 and answer.text.startswith(NOT_HTTP):
            outcome.case("no HTTP")
            continue
        outcome.case(str(answer.status_code))
        if (fault := judge(message, answer)) is not None:
            outcome.found(f"{fault}: {message}: {answer.text[:600]!r}")


def _closed_on_purpose(message: Message, error: Exception) -> bool:
    """Whether the server may close the connection: the message's length is unclear."""
    unclear = message.has(b"content-length") or message.has(b"transfer-encoding")
    return unclear and isinstance(error, httpx.TransportError)


async def canary(client: httpx.AsyncClient) -> str:
    body = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 12}
    answer = await client.post("/v1/chat/completions", json=body)
    return str(answer.json()["choices"][0]["message"]["content"]) if answer.status_code == 200 else answer.text


async def settled(watched: Watched, wanted: dict[str, object] | None) -> dict[str, object]:
    """The state as soon as it is the wanted one, or the state after _SETTLE_S."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _SETTLE_S
    while True:
        state = await watched.state()
        if wanted is None or state == wanted or loop.time() > end:
            return state
        await asyncio.sleep(0.05)


async def fuzz_in_process(cases: int, seed: int) -> Outcome:
    outcome, watched = Outcome("http"), InProcess()
    async with watched.client:
        await fuzz(watched, cases, seed, outcome)
    return outcome


async def fuzz_server(server: Server, cases: int, seed: int, outcome: Outcome) -> None:
    watched = OverHttp(server)
    async with watched.client:
        await fuzz(watched, cases, seed, outcome)


def run(cases: int, seed: int) -> Outcome:
    """Fuzzes a server of the demo model on two ranks."""
    outcome = Outcome("http")
    with served(args={"cpus_per_rank": 1}) as server:
        server.wait_ready()
        asyncio.run(fuzz_server(server, cases, seed, outcome))
        log = server.output()
    tracebacks = log.count("Traceback (most recent call last)")
    if tracebacks:
        at = log.index("Traceback (most recent call last)")
        outcome.found(f"{tracebacks} tracebacks in the server's output: {log[at : at + 1500]}")
    return outcome
