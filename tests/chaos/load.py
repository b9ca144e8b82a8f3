"""Live streams of every kind. Each answer is compared with the answer of the undisturbed server."""

import asyncio
import json
import random
import socket
import time
import uuid
from collections import Counter, deque
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from tests.chaos.asks import Ask

LONGEST_WAIT_S = 10.0  # the server ends a client that reads nothing for 30 s
SLOW_CLIENTS_BUFFER = 64 * 2**10  # bytes that the kernel receives for a slow client


@dataclass
class Heard:
    """An answer as it arrived: per choice the text, the logprobs and the finish reason; and the time of each event."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    num_tokens: int = 0
    done: bool = False
    error: str | None = None
    times: list[float] = field(default_factory=list)  # of time.time()
    began: float = field(default_factory=time.monotonic)

    @property
    def content(self) -> tuple[object, ...]:
        return (self.texts, self.logprobs, self.finish_reasons, self.num_tokens, self.done, self.error)


async def hear(
    client: httpx.AsyncClient, ask: Ask, heard: Heard | None = None, *, returns: bool = False, s_per_char: float = 0.0
) -> Heard:
    """Send a request and read its stream. Never raises: a failure is in `error`. `heard` is filled while events arrive.

    The request's id begins with its kind and its model.

    returns: after a broken connection, and where no replica has answered, ask again, for the rest. s_per_char: of a slow
    reader.
    """
    heard = heard or Heard()
    cuts = Cuts(breaks=ask.kind == "cut") if returns or ask.kind == "cut" else None
    try:
        while not await _hear_connection(client, ask, heard, cuts, s_per_char, returns=returns):  # noqa: ASYNC110
            await asyncio.sleep(0.1 * returns)
    except (httpx.HTTPError, ValueError) as error:
        heard.error = f"{type(error).__name__}: {error}"
    return heard


class Cuts:
    """A client whose connection breaks, and which asks for the rest by the last event's id. breaks: it breaks the connection
    itself, after a few events."""

    def __init__(self, *, breaks: bool) -> None:
        self._draw, self._breaks = random.Random(), breaks
        self._key, self._last = uuid.uuid4().hex, ""
        self._num_left = 0

    def begin(self) -> dict[str, str]:
        """The headers of the next connection."""
        self._num_left = self._draw.randint(0, 60)
        return {"Idempotency-Key": self._key} | ({"Last-Event-ID": self._last} if self._last else {})

    def breaks_before(self) -> bool:
        """Whether the connection breaks before the next event."""
        self._num_left -= 1
        return self._breaks and self._num_left < 0

    def received(self, event_id: str) -> None:
        self._last = event_id


async def _hear_connection(
    client: httpx.AsyncClient, ask: Ask, heard: Heard, cuts: Cuts | None, s_per_char: float, *, returns: bool
) -> bool:
    """Ask once. Returns False if the client is to ask again."""
    try:
        if ask.body["stream"]:
            is_over = await _hear_stream(client, ask, heard, cuts, s_per_char)
        else:
            is_over = await _hear_whole(client, ask, heard)
    except httpx.TransportError:
        if not returns:
            raise
        return False
    if returns and heard.error is not None and heard.error.startswith(("502", "503")):
        heard.error, is_over = None, False
    return is_over


async def _hear_whole(client: httpx.AsyncClient, ask: Ask, heard: Heard) -> bool:
    response = await client.post(ask.path, json=ask.body, headers=_named(ask))
    if response.status_code == 200:
        _take(heard, response.json())
        heard.done = True
    else:
        heard.error = f"{response.status_code} {response.text[:200]}"
    return True


async def _hear_stream(client: httpx.AsyncClient, ask: Ask, heard: Heard, cuts: Cuts | None, s_per_char: float) -> bool:
    """Read the events of one connection. Returns False if the client cut it."""
    headers = _named(ask) | ({} if cuts is None else cuts.begin())
    async with client.stream("POST", ask.path, json=ask.body, headers=headers) as response:
        if response.status_code != 200:
            heard.error = f"{response.status_code} {(await response.aread())[:200]!r}"
            return True
        event_id = ""
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                event_id = line[4:]
            if not line.startswith("data: "):
                continue
            if cuts is not None:
                if cuts.breaks_before():
                    return False
                cuts.received(event_id)
            if line == "data: [DONE]":
                heard.done = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                heard.error = event["error"]["message"]
                continue
            _take(heard, event)
            if s_per_char:
                due = heard.began + s_per_char * sum(map(len, heard.texts.values()))
                await asyncio.sleep(min(due - time.monotonic(), LONGEST_WAIT_S))
    return True


def _named(ask: Ask) -> dict[str, str]:
    return {"X-Request-Id": f"{ask.kind.replace(' ', '-')}.{ask.body['model']}.{uuid.uuid4().hex}"}


def _take(heard: Heard, event: dict[str, Any]) -> None:
    if event.get("usage"):
        heard.num_tokens = event["usage"]["completion_tokens"]
    for choice in event["choices"]:
        index = choice["index"]
        message = choice.get("delta") or choice.get("message") or {}
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        arguments = "".join(call.get("name", "") + call.get("arguments", "") for call in calls)
        text = choice.get("text") or message.get("content") or arguments
        heard.texts[index] = heard.texts.get(index, "") + text
        if text:
            heard.times.append(time.time())
        if choice.get("logprobs"):
            heard.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
        if choice.get("finish_reason"):
            heard.finish_reasons[index] = choice["finish_reason"]


class Streams:
    """Clients that each send one request after the other until `stop`. Answers that differ from `expected` are kept."""

    def __init__(
        self,
        url: str,
        requests: list[Ask],
        num_clients: int,
        *,
        returns: bool = False,
        lasts_s: float = 0.0,
        unasked: Set[str] = frozenset(),
    ) -> None:
        """returns: the clients come back after a broken connection. lasts_s: they read each answer so slowly. unasked: models
        that they leave alone."""
        limits = httpx.Limits(max_connections=num_clients + 8, max_keepalive_connections=num_clients)
        buffer = [(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_CLIENTS_BUFFER)] if lasts_s else None
        transport = httpx.AsyncHTTPTransport(limits=limits, socket_options=buffer)
        self._client = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(120.0), transport=transport, trust_env=False
        )
        self._requests, self._unasked = requests, unasked
        self.num_clients, self._returns, self._lasts_s = num_clients, returns, lasts_s
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.expected: list[Heard] = []
        self.num_answers = 0
        self.lost: list[str] = []
        self.differing: list[str] = []
        self.lasted: list[float] = []  # seconds, of each answer
        self.times: deque[tuple[str, list[float]]] = deque(maxlen=20_000)  # of the latest answers, with their kinds

    async def learn(self, base: str = "") -> None:
        """Record the answer to each request before any fault. base: the model that adapters change."""
        self.expected = await asyncio.gather(*(hear(self._client, ask) for ask in self._requests))
        for ask, heard in zip(self._requests, self.expected, strict=True):
            assert heard.error is None and heard.done, f"{ask.kind}: {heard.error}"
            if ask.kind == "adapter":
                of_base = await hear(self._client, replace(ask, body=ask.body | {"model": base, "max_tokens": 100}))
                changes = not heard.texts[0].startswith(of_base.texts[0])
                assert of_base.done and changes, f"{ask.body['model']} changes nothing"

    def endings(self) -> dict[str, int]:
        """How many of the undisturbed answers of each kind ended for which reason."""
        pairs = zip(self._requests, self.expected, strict=True)
        return Counter(f"{ask.kind}: {reason}" for ask, heard in pairs for reason in heard.finish_reasons.values())

    @property
    def num_slow(self) -> int:
        """Answers that lasted as long as they should. The server joins events of a slow reader, which may read them sooner."""
        return sum(seconds >= 0.99 * self._lasts_s for seconds in self.lasted)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._ask_on(i)) for i in range(self.num_clients)]

    async def stop(self) -> None:
        """Wait for the live answers. Those that do not end are lost."""
        self._stopping = True
        if not self._tasks:
            return
        ended, left = await asyncio.wait(self._tasks, timeout=120.0 + self._lasts_s)
        for task in left:
            task.cancel()
        await asyncio.gather(*ended)
        await asyncio.gather(*left, return_exceptions=True)
        await self._client.aclose()

    async def _ask_on(self, number: int) -> None:
        await asyncio.sleep(self._lasts_s * number / self.num_clients)  # slow clients' streams do not end together
        while not self._stopping:
            if self._requests[number % len(self._requests)].body["model"] in self._unasked:
                number += self.num_clients + 1
                await asyncio.sleep(0.05)
                continue
            ask, expected = self._requests[number % len(self._requests)], self.expected[number % len(self._requests)]
            s_per_char = self._lasts_s / max(1, sum(map(len, expected.texts.values())))
            try:
                heard = await hear(self._client, ask, returns=self._returns, s_per_char=s_per_char)
            except asyncio.CancelledError:
                self.lost.append(f"{ask.kind}: does not end")
                raise
            self.num_answers += 1
            self.lasted.append(time.monotonic() - heard.began)
            if ask.kind != "cut":  # such a client pauses by itself
                self.times.append((ask.kind, heard.times))
            if heard.error is not None or not heard.done:
                self.lost.append(f"{ask.kind}: {heard.error or 'ended without an error'}")
                await asyncio.sleep(0.2)
            elif heard.content != expected.content:
                self.differing.append(f"{ask.kind}: {heard.content!r:.400} instead of {expected.content!r:.400}")
            number += self.num_clients + 1
            await asyncio.sleep(0)
