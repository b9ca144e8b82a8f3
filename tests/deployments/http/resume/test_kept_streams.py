"""What is kept stays within its bounds: the least recently used stream of the owner with the most goes first."""

import gc
import json
import tracemalloc
from typing import Any

import pytest

from deployments.http.resume.kept_streams import TEXT_BYTES, KeepLimits, KeptStreams, StreamKey
from deployments.observe.metrics import Metrics
from tests.deployments.http.resume.test_resumed_streams import BODY, COMPLETIONS, app_of, call, cut, store_of
from tests.support.asgi_client import AsgiCall
from tests.support.http import samples
from tests.support.joined_events import id_of, joined
from tests.support.loop_engine import LoopEngine
from tests.support.scripted_engine import FakeEngine

ROOM = 2000  # of a text, but for 100 bytes


def key(name: str, owner: str = "") -> StreamKey:
    return StreamKey(owner, COMPLETIONS, name)


def store(num_rooms: int) -> KeptStreams:
    return KeptStreams(KeepLimits(60.0, num_rooms * ROOM), Metrics(in_ray=False))


def keep(kept: KeptStreams, *names: str, owner: str = "", num_bytes: int = ROOM - 100) -> None:
    for name in names:
        kept.keep_text(key(name, owner), b"x" * (num_bytes - TEXT_BYTES))


async def test_the_least_recently_used_goes_first() -> None:
    kept = store(3)
    keep(kept, "a", "b", "c")
    assert kept.text(key("a"))
    keep(kept, "d")
    assert [name for name in "abcd" if kept.text(key(name))] == ["a", "c", "d"]
    assert 2 * ROOM < kept.num_bytes <= 3 * ROOM


@pytest.mark.parametrize("size", [1900, 3000])
async def test_an_owner_with_many_displaces_none_of_an_owner_with_few(size: int) -> None:
    kept = store(4)
    keep(kept, "few", owner="a")
    keep(kept, *map(str, range(8)), owner="b", num_bytes=size)
    assert kept.text(key("few", "a")) and 2 <= len(kept) <= 4 and kept.num_bytes <= 4 * ROOM


async def test_a_stream_that_is_read_takes_no_room_and_is_not_dropped() -> None:
    async with LoopEngine().running() as engine:
        app = app_of(engine, max_bytes=20_000)
        kept, read = store_of(app), call(app, BODY | {"max_tokens": 900}, "read")
        await read.arrived(5)
        assert not kept.num_bytes
        for name in "ab":
            await cut(app, BODY, name, 5)
        assert [name for name in ("read", "a", "b") if kept.find(key(name))] == ["read", "b"]
        await read.leave()
        assert [name for name in ("read", "a", "b") if kept.find(key(name))] == ["read"] and kept.num_bytes <= 20_000


@pytest.mark.parametrize("more", [{}, {"logprobs": 5, "echo": True, "n": 2}])
async def test_the_bound_holds_over_http_and_a_stream_that_was_dropped_can_be_resumed(more: dict[str, Any]) -> None:
    async with LoopEngine().running() as engine:
        body = BODY | more
        app = app_of(engine, max_bytes=100_000)
        store = store_of(app)
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
        assert seen["llama_kept_streams_total"] == 32 and seen["llama_kept_stream_bytes"] == store.num_bytes
        assert seen['llama_dropped_streams_total{cause="memory"}'] == 31 - len(store)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions"])
async def test_what_kept_streams_hold_is_what_is_counted(path: str) -> None:
    engine = FakeEngine("Hello")
    engine.max_seq_len, engine.tool_format = 4096, "hermes"
    # A schema whose objects take far more memory than its text.
    schema = {"type": "object", "properties": {}, "examples": [[] for _ in range(15_000)]}
    app, function = app_of(engine), {"name": "a", "parameters": schema}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9, "stream": True}
    if path == "/v1/responses":
        body = {"input": "Hello", "stream": True, "store": False, "tools": [{"type": "function"} | function]}
    elif path == "/v1/messages":
        body["tools"] = [{"name": "a", "input_schema": schema}]
    else:
        body["tools"] = [{"type": "function", "function": function}]
    body["tool_choice"] = {"type": "none"} if path == "/v1/messages" else "none"
    store = store_of(app)
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
