"""What is kept stays within its bounds: the least recently used stream goes first, then the largest that is being read."""

import asyncio
import gc
import tracemalloc
from typing import Any, cast

import pytest

from deployments.api_keys import ApiKeys, digests_of
from deployments.engine.metrics import Metrics
from deployments.http.answer import AnswerSerializer
from deployments.http.app import HttpLimits, build_http_app
from deployments.http.choices import Choices
from deployments.http.plan import Plan
from deployments.http.resume.journal import Journal, parsed_id
from deployments.http.resume.kept_streams import (
    BASE_BYTES,
    Asked,
    KeepLimits,
    KeptStream,
    KeptStreams,
    Reader,
    StreamKey,
)
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.deployments.http.resume.test_resumed_streams import BODY, app_of, call, cut
from tests.support.joined_events import id_of, joined
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


async def test_a_stream_is_kept_beside_larger_ones_of_another_api_key() -> None:
    async with LoopEngine().running() as engine:
        limits = HttpLimits(keep=KeepLimits(max_bytes=100_000))
        app = build_http_app(engine, Metrics(in_ray=False), limits, keys=ApiKeys(digests_of("aaaa,bbbb")))
        events = await cut(app, BODY, "a", 10, Authorization="Bearer aaaa")
        for number in range(8):
            await cut(app, BODY | {"filler": "x" * 30_000}, str(number), 10, Authorization="Bearer bbbb")
        rest = call(app, BODY, "a", id_of(events[-1]), Authorization="Bearer aaaa")
        assert joined(events + await rest.end()) and rest.status == 200


async def test_a_dropped_stream_is_suspended_when_its_reader_leaves() -> None:
    store = KeptStreams(KeepLimits(60.0, 1))
    stream, reader = kept(store, "a")
    choices = cast(FakeChoices, stream.continuation.choices if stream.continuation is not None else None)
    assert not len(store) and not choices.is_suspended, "the reader goes on"
    store.put_back(stream, reader)
    assert choices.is_suspended


async def test_an_expired_stream_leaves_nothing() -> None:
    store = KeptStreams(KeepLimits(0.01, 2**20))
    stream, reader = kept(store, "a")
    stream.journal.add(EVENT)
    store.put_back(stream, reader)
    await asyncio.sleep(0.05)
    assert not len(store) and not store.num_bytes


async def test_events_after_each_number_are_those_that_were_added() -> None:
    sizes: list[int] = []
    journal = Journal(sizes.append)
    added = journal.add(EVENT * 3) + journal.add(b"") + journal.add(EVENT * 200)
    for number in (0, 1, 3, 202, 203):
        assert b"".join(journal.after(number)) == b"\n\n".join(added.split(b"\n\n")[number:])
    assert parsed_id(id_of(added.split(b"\n\n")[1])) == (journal.name, 2)
    assert sum(sizes) >= len(added)


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": 0}, {"n": 4}, pytest.param({"prompt": list(range(3, 600))}, marks=pytest.mark.full)]
)
async def test_kept_streams_take_about_the_memory_that_is_counted(more: dict[str, Any]) -> None:
    """Within a factor of two, so that the bound is one of memory."""
    async with LoopEngine().running() as engine:
        app = app_of(engine, max_bytes=2**30)
        (store,) = {route.app.streams for route in app.routes if hasattr(route.app, "streams")}
        body = BODY | {"max_tokens": 120} | more
        await cut(app, body, "first", 100)
        gc.collect()
        tracemalloc.start()
        try:
            before, counted_before = tracemalloc.get_traced_memory()[0], store.num_bytes
            for number in range(8):
                await cut(app, body, str(number), 100)
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        counted = store.num_bytes - counted_before
        assert len(store) == 9
        assert taken < 2 * counted, f"{taken / 8:.0f} bytes a stream, counted {counted / 8:.0f}"
        assert counted < 4 * taken, f"{taken / 8:.0f} bytes a stream, counted {counted / 8:.0f}"


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


async def test_a_resumed_request_is_counted_once() -> None:
    engine, metrics = LoopEngine(), Metrics(in_ray=False)
    app = build_http_app(engine, metrics)
    async with engine.running():
        events = await cut(app, BODY, "k", 3)
        assert await call(app, BODY, "k", id_of(events[-1])).end()
    seen = samples(metrics.render())
    assert (seen["llama_resumed_streams_total"], seen["llama_kept_streams_total"]) == (1, 1)
