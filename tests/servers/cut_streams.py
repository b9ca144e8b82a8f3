"""Streams of a server whose connections a client breaks, and goes on with."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.support.joined_events import joined
from tests.support.server import CHAT, COMPLETIONS, Server

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


def _events(received: bytes) -> list[bytes]:
    return [event for event in received.split(b"\n\n")[:-1] if not event.startswith(b":")]


@asynccontextmanager
async def client_of(server: Server, **headers: str) -> AsyncIterator[Client]:
    async with httpx.AsyncClient(base_url=server.url, timeout=180, trust_env=False, headers=headers) as http:
        yield Client(http)


def comparable(events: list[bytes]) -> list[Any]:
    """What they add up to, without the number of cached tokens, which depends on earlier requests, and that of the first event,
    which has as many as there were."""
    return [(place, value) for place, value in joined(events) if "cache" not in place and place not in VARYING]
