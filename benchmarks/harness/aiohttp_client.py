"""A client as users write it: aiohttp reads the stream line by line, and each event is parsed on arrival.

It takes more processor time than the client of benchmarks.harness.load, so the server shares its cores with a busy client.
"""

import json
import time
from typing import Any

import aiohttp

from benchmarks.harness.load import Answer, brings_token, completion_body
from benchmarks.harness.workload import Request


class AiohttpSession:
    """Streams completions from an OpenAI-compatible server over one kept connection. A Session of benchmarks.harness.load."""

    def __init__(self, base_url: str, model: str, extra: dict[str, Any] | None = None) -> None:
        self._url = base_url.rstrip("/") + "/v1/completions"
        self._model = model
        self._extra = extra or {}
        self._session: aiohttp.ClientSession | None = None
        self._answers: list[Answer] = []

    async def ask(self, request: Request) -> None:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1), timeout=timeout)
        began = time.perf_counter()
        times: list[float] = []
        try:
            body = completion_body(self._model, request, self._extra)
            async with self._session.post(self._url, json=body) as response:
                if response.status == 200:
                    num_tokens, error = await _read(response, times)
                else:
                    num_tokens, error = 0, f"HTTP {response.status}: {(await response.text())[:200]}"
                status = response.status
        except (aiohttp.ClientError, OSError) as failure:
            num_tokens, error, status = 0, str(failure) or type(failure).__name__, 0
        self._answers.append(Answer(began, time.perf_counter(), times, num_tokens, error, status))

    def answers(self) -> list[Answer]:
        taken, self._answers = self._answers, []
        return taken

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        self._session = None


async def _read(response: aiohttp.ClientResponse, times: list[float]) -> tuple[int, str | None]:
    """Append the time of each event with a token to `times`. Returns the server's token count, and the error."""
    num_tokens: int | None = None
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return len(times) if num_tokens is None else num_tokens, None
        event = json.loads(data)
        if event.get("error"):
            return 0, str(event["error"])[:200]
        if usage := event.get("usage"):
            num_tokens = usage["completion_tokens"]
        if brings_token(event):
            times.append(time.perf_counter())
    return 0, "the stream ended without [DONE]"
