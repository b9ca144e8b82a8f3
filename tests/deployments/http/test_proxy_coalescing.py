"""Streamed events behind a proxy in Python: fewer and larger messages, the same content."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deployments.engine.interface import Delta
from deployments.http.choices import Choices
from deployments.http.limits import HttpLimits
from deployments.http.plan import Plan
from deployments.http.proxy_coalescing import ProxyCoalescing
from deployments.http.sse import SLICE_BYTES, EventStream
from llama_core.scheduling.request import FinishReason, Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support import http
from tests.support.scripted_engine import FakeEngine, eventually, serve

NUM_TOKENS = 50
STEP_S = 0.01


@pytest.mark.parametrize(
    ("num_streams", "interval_s"), [(0, 0), (1, 0), (2, 0.006), (8, 0.042), (32, 0.186), (64, 0.2)]
)
def test_the_interval_grows_with_the_number_of_live_streams(num_streams: int, interval_s: float) -> None:
    assert ProxyCoalescing(num_streams=num_streams).interval_s == pytest.approx(interval_s)


def test_a_stream_is_counted_while_it_lives_also_when_it_fails() -> None:
    coalescing = ProxyCoalescing()
    seen: list[int] = []

    def fail() -> None:
        with coalescing.live_stream():
            seen.append(coalescing.num_streams)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail()
    assert seen == [1] and coalescing.num_streams == 0


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


class LargeChoices:
    """One choice whose whole answer, of several slices, can be read at once. Counts the waits between messages."""

    num_open = 1
    num_waits = 0

    def __init__(self) -> None:
        self._num_left = 5

    async def wait(self, timeout_s: float | None = None) -> bool:
        return True

    @property
    def has_arrivals(self) -> bool:
        return self._num_left > 0

    def take(self) -> tuple[int, Delta] | None:
        if not self._num_left:
            return None
        self._num_left -= 1
        self.num_open = int(self._num_left > 0)
        return 0, Delta("x" * SLICE_BYTES, [0], [], None)

    async def wait_for_end(self, timeout_s: float) -> None:
        self.num_waits += 1


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


async def test_the_first_token_does_not_wait_after_events_that_begin_the_stream() -> None:
    beside = ProxyCoalescing(longest_s=0.1, num_streams=31)
    assert (await messages(beside, opening=b"begin"))[:3] == [b"begin", b"x", b"x" * 10]


async def test_the_slices_of_a_large_answer_follow_each_other_without_an_interval() -> None:
    choices = LargeChoices()
    sent = await messages(ProxyCoalescing(num_streams=31), choices)
    assert b"".join(sent) == b"x" * (5 * SLICE_BYTES) + b"[DONE]"
    assert choices.num_waits == 0


async def test_without_coalescing_every_token_leaves_at_once() -> None:
    assert len(await messages(None)) == NUM_TOKENS


def test_the_http_limits_reach_every_stream() -> None:
    coalescing = ProxyCoalescing()
    with serve(FakeEngine("x " * 200, step_s=0.05), HttpLimits(coalescing=coalescing)) as served:
        body = {"prompt": "x", "stream": True, "max_tokens": 200}
        with http.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()  # httpx closes the connection with its generator
            next(lines)
            assert coalescing.num_streams == 1
        eventually(lambda: coalescing.num_streams == 0)


class SilentStream:
    """A stream that the test ends."""

    ended = False

    def listen(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def cancel(self) -> None:
        return

    def take(self) -> Delta:
        return Delta("x", [1], [], FinishReason.STOP if self.ended else None)


async def test_a_wait_for_the_next_message_is_cut_short_by_the_end_of_a_choice() -> None:
    stream = SilentStream()
    engine: Any = SimpleNamespace(submit=lambda *_, **__: [stream])
    choices = Choices(engine, Plan(Request([[1, 3]], [SamplingParams(max_tokens=3)])))
    stream.wake()
    waiting = asyncio.create_task(choices.wait_for_end(600))
    for _ in range(10):
        await asyncio.sleep(0)
    stream.wake()
    assert not waiting.done(), "a token is not an end"
    stream.ended = True
    stream.wake()
    await waiting
    await choices.wait_for_end(600)  # no reader has taken the end yet
    assert choices.take() is not None and choices.num_open == 0
