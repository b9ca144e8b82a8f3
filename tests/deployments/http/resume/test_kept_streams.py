"""What is kept stays within its bounds: the least recently used stream of the owner with the most goes first."""

import gc
import json
import tracemalloc
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deployments.engine.interface import Engine
from deployments.http.choices import Choices
from deployments.http.resume.kept_streams import (
    BASE_BYTES,
    KeepLimits,
    KeptStream,
    KeptStreams,
    Reader,
    StreamKey,
)
from deployments.http.resume.place import Fingerprint
from deployments.observe.metrics import Metrics
from deployments.openai.plan import Plan
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.deployments.http.resume.test_resumed_streams import BODY, app_of, call, cut
from tests.support.asgi_client import AsgiCall
from tests.support.joined_events import id_of, joined
from tests.support.loop_engine import LoopEngine
from tests.support.metric_samples import samples
from tests.support.scripted_engine import FakeEngine
from tests.support.waiting import until_true

ROOM = BASE_BYTES + 2000  # of a stream


@dataclass
class FakeChoices:
    num_bytes: int

    def suspend(self) -> list["FakeChoices"]:
        return [self]


@dataclass
class Store:
    """Kept streams of 1,900 bytes of tokens each."""

    limits: KeepLimits
    metrics: Metrics = field(default_factory=lambda: Metrics(in_ray=False))

    def __post_init__(self) -> None:
        self.kept = KeptStreams(self.limits, self.metrics)

    def begin(self, name: str, owner: str = "", num_bytes: int = 1900) -> tuple[KeptStream, Reader]:
        """A new stream that is being read."""
        plan = Plan(Request([[1]], [SamplingParams(max_tokens=4)]))
        engine, reader = cast(Engine, SimpleNamespace(adapter="")), Reader()
        fingerprint = Fingerprint(0, b"", engine, plan)
        stream = KeptStream(StreamKey(owner, "/v1/completions", name), b"", engine, plan, fingerprint)
        self.kept.begin(stream, reader)
        stream.choices = cast(Choices, FakeChoices(num_bytes))
        return stream, reader

    def leave(self, *names: str, owner: str = "", num_bytes: int = 1900) -> None:
        """New streams whose readers leave."""
        for name in names:
            self.kept.put_back(*self.begin(name, owner, num_bytes), keeps=True)

    def again(self, name: str) -> None:
        stream, reader = self.kept.find(StreamKey("", "/v1/completions", name)), Reader()
        assert stream is not None
        self.kept.take(stream, reader)
        self.kept.put_back(stream, reader, keeps=True)

    @property
    def names(self) -> list[str]:
        return [key.key for key in self.kept._streams]


async def test_the_least_recently_used_stream_goes_first() -> None:
    store = Store(KeepLimits(60.0, 3 * ROOM))
    store.leave("a", "b", "c")
    store.again("a")
    store.leave("d")
    assert sorted(store.names) == ["a", "c", "d"]
    assert 2 * ROOM < store.kept.num_bytes <= 3 * ROOM


async def test_a_stream_that_is_read_takes_no_room_and_is_not_dropped() -> None:
    store = Store(KeepLimits(60.0, 2 * ROOM))
    stream, reader = store.begin("read", num_bytes=10**6)
    assert not store.kept.num_bytes
    store.leave("a", "b", "c")
    assert store.names == ["read", "b", "c"]
    store.kept.put_back(stream, reader, keeps=True)
    assert not store.names, "the largest is the latest, and does not fit"
    assert not store.kept.num_bytes


@pytest.mark.parametrize("size", [1900, 3000])
async def test_an_owner_with_many_streams_displaces_none_of_an_owner_with_few(size: int) -> None:
    store = Store(KeepLimits(60.0, 4 * ROOM))
    store.leave("few", owner="a")
    store.leave(*map(str, range(8)), owner="b", num_bytes=size)
    assert store.names[0] == "few" and 2 <= len(store.kept) <= 4 and store.kept.num_bytes <= 4 * ROOM


@pytest.mark.parametrize("more", [{}, {"logprobs": 5, "echo": True, "n": 2}])
async def test_the_bound_holds_over_http_and_a_stream_that_was_dropped_can_be_resumed(more: dict[str, Any]) -> None:
    async with LoopEngine().running() as engine:
        body = BODY | more
        app = app_of(engine, max_bytes=100_000)
        (store,) = {route.app.streams for route in app.routes if hasattr(route.app, "streams")}
        events: list[list[bytes]] = []
        for number in range(30):
            events.append(await cut(app, body, str(number), 10))
            assert store.num_bytes <= 100_000
        assert 1 < len(store) < 30
        uncut = joined(await call(app, body, "").end())
        for number in (0, 29):
            assert joined(events[number] + await call(app, body, str(number), id_of(events[number][-1])).end()) == uncut
        seen = samples(store.metrics.render())
        assert [seen[f'llama_resumed_streams_total{{source="{source}"}}'] for source in ("kept", "computed")] == [1, 1]


def _nested() -> Any:
    """A schema whose objects take far more memory than its text."""
    return {"type": "object", "properties": {}, "examples": [[] for _ in range(15_000)]}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions"])
async def test_what_kept_streams_hold_is_what_is_counted(path: str) -> None:
    engine = FakeEngine("Hello")
    engine.max_seq_len, engine.tool_format = 4096, "hermes"
    app, schema = app_of(engine), _nested()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "stream": True}
    if path == "/v1/responses":
        body = {"input": "Hello", "stream": True, "store": False, "tool_choice": "none"}
        body["tools"] = [{"type": "function", "name": "a", "parameters": schema}]
    elif path == "/v1/messages":
        body |= {"tools": [{"name": "a", "input_schema": schema}], "tool_choice": {"type": "none"}}
    else:
        body |= {
            "tools": [{"type": "function", "function": {"name": "a", "parameters": schema}}],
            "tool_choice": "none",
        }
    (store,) = {route.app.streams for route in app.routes if hasattr(route.app, "streams")}
    raw = json.dumps(body).encode()
    await AsgiCall(app, path, raw, {"Idempotency-Key": "first"}).end()
    counted = store.num_bytes
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(4):
        await AsgiCall(app, path, raw, {"Idempotency-Key": str(number)}).end()
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(store) == 5 and store.num_bytes == pytest.approx(5 * counted, rel=0.01)
    assert held / 1.3 < store.num_bytes - counted


async def test_what_is_kept_resumed_and_dropped_is_counted() -> None:
    store = Store(KeepLimits(0.01, 2 * ROOM))
    store.leave("first")
    store.again("first")
    seen = samples(store.metrics.render())
    assert (seen["llama_kept_streams_total"], seen['llama_resumed_streams_total{source="kept"}']) == (2, 1)
    assert seen["llama_kept_stream_bytes"] == store.kept.num_bytes > 0
    await until_true("the stream has expired", lambda: not len(store.kept), pause_s=0.005)
    seen = samples(store.metrics.render())
    assert seen['llama_dropped_streams_total{cause="expired"}'] == 1 and seen["llama_kept_stream_bytes"] == 0
    store.leave("second", "third", "fourth")
    assert samples(store.metrics.render())['llama_dropped_streams_total{cause="memory"}'] == 1
    assert len(store.kept) == 2
