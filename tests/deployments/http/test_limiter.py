"""The number of threads that run for requests, cancelled ones included."""

import asyncio
import threading
from typing import Any

import pytest

from deployments.http.request_body import BodyLimits, BodyReader
from deployments.openai.limiter import ConcurrencyLimiter
from deployments.openai.schemas import CompletionBody
from llama_core.errors import QueueFull
from tests.support.waiting import until_true


class Blocking:
    """Work that runs in a thread until it is released."""

    def __init__(self) -> None:
        self.num_running = 0
        self.most_at_once = 0
        self.release = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, *_: object, **__: object) -> list[int]:
        with self._lock:
            self.num_running += 1
            self.most_at_once = max(self.most_at_once, self.num_running)
        self.release.wait(120)
        with self._lock:
            self.num_running -= 1
        return [1]


async def cancelled_after(awaited: "asyncio.Future[Any]", seconds: float) -> None:
    awaited.cancel() if seconds == 0 else asyncio.get_running_loop().call_later(seconds, awaited.cancel)
    await asyncio.gather(awaited, return_exceptions=True)


async def test_threads_of_cancelled_bodies_count_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Blocking()
    monkeypatch.setattr("deployments.http.request_body.validate", work)
    bodies = BodyReader(BodyLimits())
    raw = b'{"prompt": "' + b"x" * 200_000 + b'"}'
    for _ in range(3):
        await cancelled_after(asyncio.ensure_future(bodies.parse(raw, CompletionBody)), 0.02)
    await until_true("a thread runs", lambda: work.num_running)
    work.release.set()
    await bodies.parse(raw, CompletionBody)
    assert work.most_at_once == 1


async def test_the_weight_of_cancelled_work_counts_until_its_thread_ends() -> None:
    limiter, work = ConcurrencyLimiter(at_once=1, max_weight=10), Blocking()
    await cancelled_after(asyncio.ensure_future(limiter.run(work, 8)), 0.02)
    assert limiter.weight == 8
    waiting = asyncio.ensure_future(limiter.run(work, 2))
    await asyncio.sleep(0)
    assert limiter.weight == 10
    with pytest.raises(QueueFull):
        await limiter.run(work, 1)
    await cancelled_after(waiting, 0)  # its thread has not begun
    assert limiter.weight == 8
    work.release.set()
    assert await limiter.run(work, 2) == [1]
    assert limiter.weight == 0
