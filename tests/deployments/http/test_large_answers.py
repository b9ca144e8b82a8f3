"""Answers with many log-probabilities: bounded, and written in slices between which other tasks run."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.engine.metrics import Metrics
from deployments.http import plan
from deployments.http.app import HttpLimits, build_http_app
from deployments.http.logprobs import SLICE_ENTRIES, CompletionLogprobs
from deployments.http.slices import run_in_slices
from deployments.http.whole_answer import PIECE_BYTES
from tests.support.metric_samples import samples
from tests.support.scripted_engine import MAX_SEQ_LEN, FakeEngine, sse

MAX_PROMPT_LOGPROBS = 262_144  # that docs/http.md states
N = 128
REPOSITORY = Path(__file__).parents[3]
LONGEST_PROMPT = [5 + i for i in range(MAX_PROMPT_LOGPROBS // (N * 21))]


def client(engine: FakeEngine) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_http_app(engine, Metrics(in_ray=False)))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@dataclass
class Work:
    """Log-probabilities written and bytes joined: since another task's last turn, and the most between two of its turns."""

    entries: int = 0
    joined_bytes: int = 0
    most_entries: int = 0
    most_bytes: int = 0

    def other_task_runs(self) -> None:
        self.most_entries = max(self.most_entries, self.entries)
        self.most_bytes = max(self.most_bytes, self.joined_bytes)
        self.entries = self.joined_bytes = 0


@contextlib.asynccontextmanager
async def work_between_turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Work]:
    work, take, written = Work(), CompletionLogprobs.take, CompletionLogprobs.written

    def counted_take(writer: CompletionLogprobs, tokens: Any, logprobs: Any) -> Any:
        work.entries += len(tokens) * (1 + writer._num_top)
        return take(writer, tokens, logprobs)

    def counted_written(writer: CompletionLogprobs, parts: Any) -> bytes:
        found = written(writer, parts)
        work.joined_bytes += len(found)
        return found

    async def tick() -> None:
        while True:
            await asyncio.sleep(0)
            work.other_task_runs()

    monkeypatch.setattr(CompletionLogprobs, "take", counted_take)
    monkeypatch.setattr(CompletionLogprobs, "written", counted_written)
    ticking = asyncio.create_task(tick())
    yield work
    await asyncio.sleep(0)  # the last turn of the block counts too
    ticking.cancel()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": LONGEST_PROMPT, "echo": True, "logprobs": 20, "n": N, "max_tokens": 1},
        {"prompt": [5] * (MAX_SEQ_LEN - 1), "echo": True, "logprobs": 7, "n": N, "max_tokens": 1},
        {"prompt": [[5] * (MAX_SEQ_LEN - 1)] * N, "echo": True, "logprobs": 7, "max_tokens": 1},
        {"prompt": [5] * (MAX_SEQ_LEN - 41), "logprobs": 20, "n": N, "max_tokens": 40, "ignore_eos": True},
    ],
    ids=["many alternatives", "long prompt", "many prompts", "many tokens"],
)
async def test_other_tasks_run_often_while_the_largest_legal_answers_are_written(
    body: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client(FakeEngine()) as asking, work_between_turns(monkeypatch) as work:
        answer = await asking.post("/v1/completions", json=body | {"stream": stream})
        assert answer.status_code == 200, answer.text
    assert 0 < work.most_entries <= 4 * SLICE_ENTRIES  # some of these answers have 262,144
    assert 0 < work.most_bytes <= 2 * PIECE_BYTES < len(answer.content) / 3


@pytest.mark.parametrize(
    ("prompt", "n", "logprobs"), [([*LONGEST_PROMPT, 5], N, 20), ([[5] * 255] * 65, 1, 15), ([5] * 128, N, 20)]
)
async def test_more_log_probabilities_of_prompts_than_the_limit_are_400(prompt: Any, n: int, logprobs: int) -> None:
    engine = FakeEngine()
    body = {"prompt": prompt, "n": n, "logprobs": logprobs, "max_tokens": 1}
    async with client(engine) as asking:
        answer = await asking.post("/v1/completions", json=body | {"echo": True})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_parameter", "logprobs")
        assert str(MAX_PROMPT_LOGPROBS) in error["message"]
        assert not engine.streams
        assert (await asking.post("/v1/completions", json=body)).status_code == 200  # without echo


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("completions", "logprobs", {"prompt": "x", "n": N, "max_tokens": 253}),
        ("completions", "logprobs", {"prompt": ["x"] * N, "max_tokens": 253}),
        ("chat/completions", "top_logprobs", {"n": N, "logprobs": True}),
    ],
    ids=["choices", "prompts", "a chat that may fill the context"],
)
async def test_more_log_probabilities_of_generated_tokens_than_the_limit_are_400_before_any_is_generated(
    monkeypatch: pytest.MonkeyPatch, path: str, param: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(plan, "MAX_LOGPROBS", 2**15)
    engine = FakeEngine("Yes.")
    body = body | ({"messages": [{"role": "user", "content": "x"}]} if path.startswith("chat") else {}) | {param: 20}
    async with client(engine) as asking:
        answer = await asking.post(f"/v1/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_parameter", param)
        assert "32768" in error["message"] and "max_tokens" in error["message"]
        assert not engine.streams
        assert (await asking.post(f"/v1/{path}", json=body | {"max_tokens": 12})).status_code == 200
        assert (
            await asking.post(f"/v1/{path}", json=body | {"top_logprobs": None, "logprobs": None})
        ).status_code == 200


def test_a_batch_of_128_whole_contexts_of_llama_2_is_over_the_limit_and_one_is_not() -> None:
    assert 4096 * 21 * 8 <= plan.MAX_LOGPROBS < 128 * 4095 * 21
    assert f"{plan.MAX_LOGPROBS:,}" in (REPOSITORY / "docs" / "http.md").read_text()


class Stalled:
    """A client that sends a request and then reads only the first `num_pieces` pieces of its answer."""

    def __init__(self, body: dict[str, Any], num_pieces: int) -> None:
        self._body, self._left = json.dumps(body).encode(), num_pieces
        self._sent = False
        self.pieces: list[bytes] = []
        self.was_completed = False

    async def receive(self) -> dict[str, Any]:
        if self._sent:
            await asyncio.Event().wait()
        self._sent = True
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            if not self._left:
                await asyncio.Event().wait()
            self._left -= 1
            self.pieces.append(message["body"])
            self.was_completed = not message.get("more_body")

    async def ask(self, app: Any) -> None:
        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
        await app(scope, self.receive, self.send)


LARGE = {"prompt": "x", "n": 50, "max_tokens": 100, "logprobs": 20, "ignore_eos": True}


@pytest.mark.parametrize("num_pieces", [0, 2])
async def test_a_client_that_does_not_read_its_whole_answer_is_disconnected(
    num_pieces: int, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(in_ray=False)
    stalled = Stalled(LARGE, num_pieces)
    async with asyncio.timeout(60):
        await stalled.ask(build_http_app(FakeEngine(), metrics, HttpLimits(send_timeout_s=0.1)))
    assert not stalled.was_completed
    assert "a client did not read its answer for 0.1 s" in caplog.text
    assert samples(metrics.render())['llama_requests_total{outcome="cancelled",path="/v1/completions"}'] == 1
    assert max(map(len, stalled.pieces), default=0) <= PIECE_BYTES


async def test_a_whole_answer_in_pieces_is_the_answer() -> None:
    metrics = Metrics(in_ray=False)
    reading = Stalled(LARGE, 10_000)
    await reading.ask(build_http_app(FakeEngine(), metrics))
    assert len(reading.pieces) > 5 and reading.was_completed
    assert len(json.loads(b"".join(reading.pieces))["choices"]) == 50
    assert samples(metrics.render())['llama_requests_total{outcome="ok",path="/v1/completions"}'] == 1


async def test_the_log_probabilities_of_a_prompt_are_written_once_for_all_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_written = 0

    def counted(writer: CompletionLogprobs, *arguments: Any) -> Any:
        nonlocal num_written
        num_written += len(arguments[0])
        return take(writer, *arguments)

    take = CompletionLogprobs.take
    monkeypatch.setattr(CompletionLogprobs, "take", counted)
    body = {"prompt": [[7] * 40, [8] * 30], "echo": True, "logprobs": 1, "n": 5, "max_tokens": 1}
    async with client(FakeEngine()) as asking:
        choices = (await asking.post("/v1/completions", json=body)).json()["choices"]
    assert num_written == 70 + 10  # two prompts, and one token of each choice
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [41] * 5 + [31] * 5
    assert all(choice["logprobs"] == choices[0]["logprobs"] for choice in choices[:5])


async def test_a_long_delta_becomes_several_events_that_add_up_to_it() -> None:
    body = {"prompt": [5] * 250, "echo": True, "logprobs": 20, "max_tokens": 3}
    async with client(FakeEngine()) as asking:
        whole = (await asking.post("/v1/completions", json=body)).json()["choices"][0]
        chunks = sse((await asking.post("/v1/completions", json=body | {"stream": True})).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    num_entries = [sum(len(top or {}) for top in choice["logprobs"]["top_logprobs"]) for choice in choices]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [195, 55, 1, 1, 1]
    assert max(num_entries) <= SLICE_ENTRIES
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for choice in choices for value in choice["logprobs"][name]] == values
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]


async def test_other_tasks_run_between_slices() -> None:
    seen: list[str] = []

    def work() -> Any:
        for number in range(3):
            seen.append(f"slice {number}")
            yield
        return json.dumps(seen)

    async def other() -> None:
        for _ in range(3):
            seen.append("other")
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    assert json.loads(await run_in_slices(work()))[:4] == ["slice 0", "other", "slice 1", "other"]
    await running
