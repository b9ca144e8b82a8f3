"""Streamed events behind a proxy in Python: fewer and larger messages, the same content."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from deployments.engine.interface import Delta
from deployments.http.proxy_coalescing import ProxyCoalescing
from deployments.http.sse import EventStream

NUM_TOKENS = 50
STEP_S = 0.01


@pytest.mark.parametrize(
    ("num_streams", "interval_s"), [(0, 0), (1, 0), (2, 0.006), (8, 0.042), (32, 0.186), (64, 0.2)]
)
def test_the_interval_grows_with_the_number_of_live_streams(num_streams: int, interval_s: float) -> None:
    assert ProxyCoalescing(num_streams=num_streams).interval_s == pytest.approx(interval_s)


class TimedChoices:
    """One choice that gains a token every 10 ms of its own clock. Tokens that are not taken become one delta."""

    num_open = 1

    def __init__(self) -> None:
        self.now_s = 0.0
        self._num_taken = 0

    def _num_there(self) -> int:
        return min(NUM_TOKENS, 1 + round(self.now_s / STEP_S))

    async def wait(self, timeout_s: float | None = None) -> bool:
        if self._num_there() == self._num_taken:
            self.now_s += STEP_S
        return True

    @property
    def has_arrivals(self) -> bool:
        return self._num_there() > self._num_taken

    def take(self) -> tuple[int, Delta] | None:
        num, begin = self._num_there(), self._num_taken
        if num == begin:
            return None
        self._num_taken = num
        self.num_open = int(num < NUM_TOKENS)
        return 0, Delta("x" * (num - begin), list(range(begin, num)), [], None)

    async def wait_for_end(self, timeout_s: float) -> None:
        self.now_s = min(self.now_s + timeout_s, (NUM_TOKENS - 1) * STEP_S)


class PlainSerializer:
    has_logprobs = False

    def __init__(self, opening: bytes = b"") -> None:
        self._opening = opening

    def opening(self) -> bytes:
        return self._opening

    def chunk(self, index: int, delta: Delta) -> bytes:
        return delta.text.encode()

    def end_of_stream(self) -> bytes:
        return b"[DONE]"


async def messages(coalescing: ProxyCoalescing | None, choices: Any = None, opening: bytes = b"") -> list[bytes]:
    """The bodies that one stream sends."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    choices = choices or TimedChoices()
    record: Any = SimpleNamespace(delta=lambda _: None, succeeded=lambda: None, streaming=lambda: None)
    stream = EventStream(
        cast(Any, choices),
        cast(Any, PlainSerializer(opening)),
        record,
        ping_s=10,
        send_timeout_s=10,
        coalescing=coalescing,
    )
    await stream.run(send, cast(Any, None))
    return sent


async def test_beside_other_streams_fewer_messages_have_the_same_content() -> None:
    alone, beside = ProxyCoalescing(), ProxyCoalescing(longest_s=0.1, num_streams=31)
    each, joined = await messages(alone), await messages(beside)
    assert each == [b"x"] * (NUM_TOKENS - 1) + [b"x[DONE]"], "one stream alone sends every token at once"
    assert joined == [b"x", *[b"x" * 10] * 4, b"x" * 9 + b"[DONE]"], "then a message every 100 ms"
    assert (alone.num_streams, beside.num_streams) == (0, 31)
