"""What is kept stays within its bounds: the least recently used stream goes first, then the largest that is being read."""

from typing import cast

import pytest

from deployments.http.choices import Choices
from deployments.http.resume.kept_streams import (
    BASE_BYTES,
    Asked,
    KeepLimits,
    KeptStream,
    KeptStreams,
    Reader,
    StreamKey,
)
from deployments.observe.metrics import Metrics
from deployments.openai.answers.answer import AnswerSerializer
from deployments.openai.plan import Plan
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.deployments.http.resume.test_resumed_streams import BODY, app_of, call, cut
from tests.support.joined_events import id_of
from tests.support.loop_engine import LoopEngine
from tests.support.metric_samples import samples
from tests.support.waiting import until_true

EVENT = b'data: {"text":"' + b"x" * 1000 + b'"}\n\n'
ROOM = BASE_BYTES + 2000  # of a stream with one event


class FakeChoices:
    def __init__(self) -> None:
        self.is_suspended = False

    def suspend(self) -> "FakeChoices":
        self.is_suspended = True
        return self


class FakeSerializer:
    has_logprobs = False


def kept(store: KeptStreams, name: str, owner: str = "") -> tuple[KeptStream, Reader]:
    """A new stream that is being read."""
    key, reader = StreamKey(owner, "/v1/completions", name), Reader()
    plan = Plan(Request([[1]], [SamplingParams(max_tokens=4)]))
    store.keep(key, Asked(b"", 0), plan, cast(Choices, FakeChoices()), cast(AnswerSerializer, FakeSerializer()))
    return store.take(key, reader), reader


def names(store: KeptStreams) -> list[str]:
    return [key.key for key in store._streams]


async def test_the_least_recently_used_stream_goes_first() -> None:
    store = KeptStreams(KeepLimits(60.0, 3 * ROOM))
    for name in "abc":
        stream, reader = kept(store, name)
        stream.journal.add(EVENT)
        store.put_back(stream, reader)
    again = Reader()
    store.put_back(store.take(StreamKey("", "/v1/completions", "a"), again), again)
    kept(store, "d")[0].journal.add(EVENT)
    assert names(store) == ["c", "a", "d"]
    assert store.num_bytes <= 3 * ROOM


async def test_of_streams_that_are_read_the_largest_goes_and_its_events_have_no_ids_then() -> None:
    store = KeptStreams(KeepLimits(60.0, 2 * ROOM + 4000))
    small, large = kept(store, "small")[0], kept(store, "large")[0]
    small.journal.add(EVENT)
    while large.key in store._streams:
        assert large.journal.add(EVENT).startswith(b"id: ")
    assert large.journal.add(EVENT) == EVENT and names(store) == ["small"]
    assert small.journal.add(EVENT).startswith(b"id: ")
    assert store.num_bytes == small.num_bytes


@pytest.mark.parametrize("are_read", [False, True])
async def test_an_owner_with_many_streams_displaces_none_of_an_owner_with_few(are_read: bool) -> None:
    store = KeptStreams(KeepLimits(60.0, 4 * ROOM))
    stream, reader = kept(store, "few", "a")
    store.put_back(stream, reader)
    for number in range(8):
        stream, reader = kept(store, f"many {number}", "b")
        stream.journal.add(EVENT * (2 if are_read else 1))
        if not are_read:
            store.put_back(stream, reader)
    assert names(store)[0] == "few" and 2 <= len(store) <= 4 and store.num_bytes <= 4 * ROOM


async def test_the_bound_holds_over_http_and_the_latest_stream_can_be_resumed() -> None:
    async with LoopEngine().running() as engine:
        app = app_of(engine, max_bytes=100_000)
        (store,) = {route.app.streams for route in app.routes if hasattr(route.app, "streams")}
        events: list[list[bytes]] = []
        for number in range(30):
            events.append(await cut(app, BODY, str(number), 10))
            assert store.num_bytes <= 100_000
        assert 1 < len(store) < 30
        first, last = (call(app, BODY, str(number), id_of(events[number][-1])) for number in (0, 29))
        await last.end()
        await first.end()
        assert (first.status, last.status) == (404, 200)


async def test_what_is_kept_resumed_and_dropped_is_counted() -> None:
    metrics = Metrics(in_ray=False)

    store = KeptStreams(KeepLimits(0.01, 2 * ROOM), metrics)
    first, reader = kept(store, "first")
    store.put_back(first, reader)
    other = Reader()
    store.resume(first.key, other)
    seen = samples(metrics.render())
    assert (seen["llama_kept_streams_total"], seen["llama_resumed_streams_total"]) == (1, 1)
    assert seen["llama_kept_stream_bytes"] == store.num_bytes > 0
    store.put_back(first, other)
    await until_true("the stream has expired", lambda: not len(store), pause_s=0.005)
    seen = samples(metrics.render())
    assert seen['llama_dropped_streams_total{cause="expired"}'] == 1 and seen["llama_kept_stream_bytes"] == 0
    for name in ("second", "third", "fourth"):
        kept(store, name)
    assert samples(metrics.render())['llama_dropped_streams_total{cause="memory"}'] == 1 and len(store) == 2
