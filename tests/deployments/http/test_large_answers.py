"""Answers with many log-probabilities: bounded, and written in slices between which other tasks run."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from deployments.http.generation import PIECE_BYTES
from deployments.openai import plan
from deployments.openai.answers.logprobs import SLICE_ENTRIES, CompletionLogprobs
from tests.support.scripted_engine import MAX_SEQ_LEN, FakeEngine, ask, in_process

MAX_PROMPT_LOGPROBS = 262_144  # that docs/http.md states
N = 128
LONGEST_PROMPT = [5 + i for i in range(MAX_PROMPT_LOGPROBS // (N * 21))]


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
    async with in_process(FakeEngine()) as asking, work_between_turns(monkeypatch) as work:
        answer = await asking.post("/v1/completions", json=body | {"stream": stream})
        assert answer.status_code == 200, answer.text
    assert 0 < work.most_entries <= 4 * SLICE_ENTRIES  # some of these answers have 262,144
    assert 0 < work.most_bytes <= 2 * PIECE_BYTES < len(answer.content) / 3


@pytest.mark.parametrize(
    ("param", "prompt", "n", "num_top"),
    [
        ("logprobs", [*LONGEST_PROMPT, 5], N, 20),
        ("logprobs", [[5] * 255] * 65, 1, 15),
        ("logprobs", [5] * 128, N, 20),
        ("prompt_logprobs", [[5] * 200] * 100, 1, 20),
    ],
)
async def test_more_log_probabilities_of_prompts_than_the_limit_are_400(
    param: str, prompt: Any, n: int, num_top: int
) -> None:
    engine, body = FakeEngine(), {"prompt": prompt, "n": n, "max_tokens": 1, "echo": True}
    answer = await ask(engine, "/v1/completions", body | {param: num_top})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_parameter", param)
    assert str(MAX_PROMPT_LOGPROBS) in error["message"] and not engine.streams
    given = {"logprobs": num_top, "echo": False} if param == "logprobs" else {}
    assert (await ask(engine, "/v1/completions", body | given)).status_code == 200


CHAT = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [("completions", "logprobs", {"prompt": "x", "max_tokens": 253}), ("chat/completions", "top_logprobs", CHAT)],
)
async def test_more_log_probabilities_of_generated_tokens_than_the_limit_are_400(
    monkeypatch: pytest.MonkeyPatch, path: str, param: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(plan, "MAX_LOGPROBS", 2**15)
    engine, body = FakeEngine("Yes."), body | {param: 20, "n": N}
    answer = await ask(engine, f"/v1/{path}", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_parameter", param)
    assert "32768" in error["message"] and "max_tokens" in error["message"]
    assert not engine.streams
    assert (await ask(engine, f"/v1/{path}", body | {"max_tokens": 12})).status_code == 200
