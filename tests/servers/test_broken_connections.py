"""Connections to real servers break: each stream goes on where it was cut."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.support.joined_events import id_of, joined
from tests.support.server import CHAT, COMPLETIONS, Server, is_idle
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

TOKENS = 48
HELLO = {"messages": [{"role": "user", "content": "Tell me a story about a dog."}]}
SEEDED = {"temperature": 0.9, "seed": 11, "max_tokens": TOKENS, "stream_options": {"include_usage": True}}
TALE = {"prompt": "once upon a time", **SEEDED}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
TOOL = {"type": "function", "function": {"name": "go", "parameters": PERSON}}  # a long one would not fit the context
VARYING = ("message_start.message.usage.output_tokens",)
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, TALE | {"temperature": 0.0, "ignore_eos": True}),
    "two choices": (COMPLETIONS, TALE | {"n": 2, "ignore_eos": True}),
    "logprobs": (COMPLETIONS, TALE | {"logprobs": 3, "echo": True}),
    "penalties": (COMPLETIONS, TALE | {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "min_tokens": 8}),
    "chat": (CHAT, HELLO | SEEDED | {"logprobs": True, "top_logprobs": 2, "n": 2}),
    "stop": (CHAT, HELLO | SEEDED | {"max_tokens": 60, "stop": [" a ", "the"]}),
    "schema": (CHAT, HELLO | SEEDED | {"max_tokens": 40, "structured_outputs": {"json": PERSON}}),
    "tools": (CHAT, HELLO | SEEDED | {"max_tokens": 40, "tools": [TOOL], "tool_choice": "required"}),
    "messages": ("/v1/messages", HELLO | {"max_tokens": TOKENS, "temperature": 0}),
    "responses": ("/v1/responses", {"input": "Hello", "max_output_tokens": TOKENS, "temperature": 0}),
}


class Client:
    """Streams of one server."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def events(
        self, path: str, body: dict[str, Any], key: str = "", last: str = "", most: int | None = None, **headers: str
    ) -> list[bytes]:
        """The first events of a stream, `most` at most; the connection is broken after them."""
        headers |= {name: value for name, value in (("Idempotency-Key", key), ("Last-Event-ID", last)) if value}
        received = b""
        async with self._http.stream("POST", path, json=body | {"stream": True}, headers=headers) as answer:
            if answer.status_code != 200:
                raise AssertionError(f"{answer.status_code} {(await answer.aread()).decode()}")
            if most != 0:
                async for piece in answer.aiter_raw():
                    received += piece
                    if most is not None and len(_events(received)) >= most:
                        break
        return _events(received)[:most]

    async def status(self, path: str, body: dict[str, Any], key: str, last: str, **headers: str) -> tuple[int, str]:
        headers |= {"Idempotency-Key": key, "Last-Event-ID": last}
        answer = await self._http.post(path, json=body | {"stream": True}, headers=headers)
        return answer.status_code, answer.json()["error"]["code"] if answer.status_code >= 400 else ""


def _events(received: bytes) -> list[bytes]:
    return [event for event in received.split(b"\n\n")[:-1] if not event.startswith(b":")]


@asynccontextmanager
async def client_of(server: Server, **headers: str) -> AsyncIterator[Client]:
    async with httpx.AsyncClient(base_url=server.url, timeout=180, trust_env=False, headers=headers) as http:
        yield Client(http)


def cases() -> Iterator[Any]:
    """Each kind through each proxy. A chat has two choices and log-probabilities, too."""
    for server, name, in_each_run in (
        ("demo", "HAProxy", REQUESTS.keys() - {"two choices", "logprobs"}),
        ("plain", "Serve's proxy", {"chat"}),
    ):
        for kind in REQUESTS:
            marks = [] if kind in in_each_run else [pytest.mark.full]
            yield pytest.param(server, kind, id=f"through {name}-{kind}", marks=marks)


@pytest.mark.parametrize(("server", "kind"), cases(), indirect=["server"])
async def test_a_stream_cut_between_events_equals_the_uncut_one(server: Server, kind: str) -> None:
    path, body = REQUESTS[kind]
    async with client_of(server) as client:
        uncut = await client.events(path, body)
        expected = comparable(uncut)

        async def resumed(num_events: int) -> list[bytes]:
            key = f"{kind} {num_events} {server.port}"
            first = await client.events(path, body, key, most=num_events)
            return first + await client.events(path, body, key, id_of(first[-1]) if first else "")

        # The first and the last events differ from those between them, of which every eighth is enough.
        numbers = sorted({0, 1, 2, len(uncut) - 2, len(uncut) - 1, len(uncut), *range(3, len(uncut) - 2, 8)})
        for begin in range(0, len(numbers), 8):
            for events in await asyncio.gather(*map(resumed, numbers[begin : begin + 8])):
                assert comparable(events) == expected
    wait_until("no block is in use", lambda: is_idle(server))


def comparable(events: list[bytes]) -> list[Any]:
    """What they add up to, without the number of cached tokens, which depends on earlier requests, and that of the first event,
    which has as many as there were."""
    return [(place, value) for place, value in joined(events) if "cache" not in place and place not in VARYING]
