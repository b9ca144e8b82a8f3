"""A client of the golden model that counts how its completions end, and knows the replicas that answered it."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, Final

import httpx

PROMPT: Final[dict[str, Any]] = {"model": "golden", "prompt": [1, 264, 495], "temperature": 0, "ignore_eos": True}
# A request whose body is incomplete counts as load, and leaves processor time to the processes that start.
SLOW_BODY_S: Final = 2.0
NUM_TOKENS: Final = 60  # of a completion of the load: enough that some are seen running


class CountingClient:
    """An HTTP client that counts how each completion ended."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.endings: Counter[str] = Counter()
        self.streams_wanted = 0
        self.ranks: dict[tuple[int, ...], int] = {}  # pids of a replica's ranks -> most requests seen running on it

    async def look(self, method: str, path: str, **body: Any) -> httpx.Response | None:
        """None where nothing answers within 10 s."""
        with contextlib.suppress(httpx.TransportError):
            return await self.http.request(method, path, json=body or None, timeout=10)
        return None

    async def props(self) -> tuple[int, ...]:
        """Pids of the ranks of the replica that answers; () if none does."""
        answer = await self.look("GET", "/props")
        if answer is None or answer.status_code != 200 or answer.json()["phase"] != "ready":
            return ()
        pids = tuple(rank["pid"] for rank in answer.json()["ranks"])
        self.ranks[pids] = max(self.ranks.get(pids, 0), answer.json()["requests_running"])
        return pids

    async def stream(
        self, max_tokens: int = NUM_TOKENS, begun: asyncio.Event | None = None, slow_body_s: float = 0.0
    ) -> str:
        """The end of a streamed completion: its finish reason, or its error. slow_body_s: until its body is complete."""
        body = json.dumps(PROMPT | {"max_tokens": max_tokens, "stream": True}).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}

        async def parts() -> AsyncIterator[bytes]:
            yield body[:-1]
            await asyncio.sleep(slow_body_s)
            yield body[-1:]

        reason, done, count = "no finish reason", False, 0
        try:
            async with self.http.stream(
                "POST", "/v1/completions", content=parts(), headers=headers, timeout=180
            ) as response:
                if response.status_code != 200:
                    return f"{response.status_code} {(await response.aread())[:200]!r}"
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        reason, count = choice["finish_reason"] or reason, count + 1
                        if begun is not None:
                            begun.set()
        except httpx.HTTPError as error:
            return type(error).__name__
        return reason if done and count > 1 else f"cut off: {count} chunks, {reason}"

    async def stream_until_it_fails(self, begun: asyncio.Event) -> str:
        """How the first stream ended that was not whole; at most 50 streams."""
        for _ in range(50):
            if (ending := await self.stream(4000, begun)) != "length":
                return ending
        return "length"

    async def keep_streaming(self, worker: int) -> None:
        """Stream one completion after the other while `worker` is below the wanted number of streams."""
        while True:
            if worker < self.streams_wanted:
                self.endings[await self.stream(slow_body_s=SLOW_BODY_S)] += 1
            await asyncio.sleep(0.05)
