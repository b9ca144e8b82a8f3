"""Finds streams that wait although an engine that can compute them has a free slot, from what fronts tell in GET /props."""

import asyncio
import time
from collections import defaultdict
from typing import Any, Final

import httpx

LOOK_EVERY_S: Final = 0.2
FORGET_S: Final = 5.0  # a front that has not named a stream for so long has it no more


class FreeSlots:
    """`waits`: of each stream that has waited so, by request id, the seconds. Its id names its kind and model (`load.hear`)."""

    def __init__(self, url: str, max_batch_size: int) -> None:
        self.waits: dict[str, float] = {}
        self._url, self._max_batch_size = url, max_batch_size
        self._full_s: defaultdict[str, float] = defaultdict(
            time.monotonic
        )  # by model: no engine had a free slot, at last
        self._waiting: dict[str, tuple[float, float]] = {}  # by request id: since when, and when it was seen

    async def watch(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=30.0, trust_env=False) as client:
            while True:
                try:
                    response = await client.get("/props")
                    if response.status_code == 200:
                        self.look(response.json(), time.monotonic())
                except httpx.HTTPError:  # the front that was asked has ended
                    pass
                await asyncio.sleep(LOOK_EVERY_S)

    def look(self, props: dict[str, Any], now_s: float) -> None:
        for model in {engine["model"] for engine in props["engines"]} | set(self._full_s):
            self._full_s[model]  # begins with the first look
            if not any(engine["model"] == model and self._has_free_slot(engine) for engine in props["engines"]):
                self._full_s[model] = now_s
        for stream in props.get("streams", ()):
            request_id = stream["request_id"]
            kind, _, rest = request_id.partition(".")
            model = rest.rpartition(".")[0]
            if stream["phase"] == "running":
                self._waiting.pop(request_id, None)
            elif kind != "adapter" and model in self._full_s:  # one whose adapter has no place waits beside free slots
                since_s, _ = self._waiting.get(request_id, (now_s, 0.0))
                self._waiting[request_id] = since_s, now_s
                waited_s = now_s - max(since_s, self._full_s[model])
                if waited_s > self.waits.get(request_id, 0.0):
                    self.waits[request_id] = waited_s
        self._waiting = {
            request_id: times for request_id, times in self._waiting.items() if now_s - times[1] < FORGET_S
        }

    def _has_free_slot(self, engine: dict[str, Any]) -> bool:
        num_live: int = engine["requests_running"] + engine["requests_waiting"]
        return num_live < self._max_batch_size and engine["phase"] == "ready"
