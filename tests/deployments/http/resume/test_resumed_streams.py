"""A stream that is cut after any of its events goes on with exactly what follows, on its replica and on others."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from deployments.api_keys import ApiKeys, digests_of
from deployments.engine.interface import Engine, Models
from deployments.fleet.model_view import ModelView
from deployments.http.app import HttpApp, build_http_app
from deployments.http.limits import HttpLimits
from deployments.http.resume.kept_streams import KeepLimits, KeptStreams
from deployments.observe.metrics import Metrics
from tests.support.asgi_client import AsgiCall
from tests.support.http import samples
from tests.support.joined_events import data_of, id_of, joined
from tests.support.loop_engine import LoopEngine
from tests.support.scripted_engine import FakeEngine
from tests.support.virtual_loop import VirtualLoop
from tests.support.waiting import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODY: dict[str, Any] = {"prompt": "Once upon a time", "stream": True, "max_tokens": 24, "ignore_eos": True, "seed": 7}
USAGE = {"stream_options": {"include_usage": True}}
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


def app_of(engine: Models, **keep: Any) -> HttpApp:
    limits = HttpLimits(keep=KeepLimits(**keep)) if keep else None
    return build_http_app(engine, Metrics(in_ray=False), limits)


def store_of(app: HttpApp) -> KeptStreams:
    (store,) = {route.app.streams for route in app.routes if hasattr(route.app, "streams")}
    return store  # type: ignore[no-any-return]


def call(
    app: HttpApp, body: dict[str, Any], key: str = "a", last: str = "", path: str = COMPLETIONS, **more: str
) -> AsgiCall:
    headers = {"Idempotency-Key": key} if key else {}
    headers |= {"Last-Event-ID": last} if last else {}
    return AsgiCall(app, path, body, headers | more)


async def cut(
    app: HttpApp, body: dict[str, Any], key: str, num_events: int, path: str = COMPLETIONS, **more: str
) -> list[bytes]:
    """The first events of a stream whose client leaves when it has them."""
    first = call(app, body, key, path=path, **more)
    events = (await first.arrived(num_events))[:num_events]
    await first.leave()
    return events


async def equals_uncut_at_every_event(engine: Models, body: dict[str, Any], path: str = COMPLETIONS) -> int:
    """Compare the stream, cut after each event and resumed there and on another replica, with the stream that is not cut;
    returns the number of events."""
    app, other = app_of(engine), app_of(engine)
    uncut = await call(app, body, "", path=path).end()
    assert not any(b"id: " in event or b"last_event_id" in event for event in uncut), (
        "who does not ask for ids has none"
    )
    for num_events in range(len(uncut) + 1):
        key = str(num_events)
        events = await cut(app, body, key, num_events, path)
        last = id_of(events[-1]) if events else ""
        for replica in (other, app):
            rest = await call(replica, body, key, last, path).end()
            assert joined(events + rest) == joined(uncut)
            check_ids(events + rest)
    return len(uncut)


def check_ids(events: list[bytes]) -> None:
    """Each event has one of its own, in its JSON too, and all are of one answer. Numbers of events only grow."""
    ids = [id_of(event) for event in events]
    assert len(set(ids)) == len(ids) and all(ids)
    contents = [json.loads(data_of(event)) for event in events if data_of(event) != "[DONE]"]
    assert [content["last_event_id"] for content in contents] == ids[: len(contents)]
    assert len({content["id"] for content in contents if "choices" in content}) <= 1
    numbers = [content["sequence_number"] for content in contents if "sequence_number" in content]
    assert numbers == sorted(set(numbers))


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "usage": {**USAGE, "temperature": 1.0},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "two choices": {"n": 2, "temperature": 1.0, **USAGE},
    "logprobs": {"logprobs": 0, **USAGE},
    "echo": {"logprobs": 0, "echo": True, "n": 2},
    "two prompts": {"prompt": ["Once", "There was"], **USAGE},
    "stop": {"stop": ["a", "zz"], "ignore_eos": False, **USAGE},
    "ends itself": {"ignore_eos": False, "max_tokens": 200},
    "stop token": {"stop_token_ids": [300, 301]},
    "token ids": {"return_token_ids": True, "prompt": ["Once", "There was"], "n": 2, "temperature": 1.0},
    "token ids and logprobs": {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1},
}


@pytest.mark.parametrize("kind", REQUESTS)
async def test_a_stream_cut_after_any_event_equals_the_uncut_one(kind: str) -> None:
    async with LoopEngine().running() as engine:
        await equals_uncut_at_every_event(engine, BODY | REQUESTS[kind])
        await until("no sequence runs", lambda: _idle(engine))


async def _num_live(engine: LoopEngine, count: int) -> bool:
    return engine.num_live == count


async def _idle(engine: LoopEngine) -> bool:
    return engine.num_live == 0 and engine.num_blocks_used == 0


async def test_a_kept_stream_is_resumed_after_its_adapter_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    models: dict[str, Engine] = {}
    monkeypatch.setattr(LoopEngine, "models", models)
    async with LoopEngine().running() as engine:
        own: Engine = ModelView(engine, engine.model_id)
        models |= {"base": own, "adapter": own}
        app, body = app_of(engine), BODY | {"model": "adapter"}
        uncut = await call(app, body, "").end()
        events = await cut(app, body, "a", 5)
        del models["adapter"]
        rest = await call(app, body, "a", id_of(events[-1])).end()
        assert joined(events + rest) == joined(uncut)
        new = call(app, body, "b")
        await new.end()
        assert new.status == 404


async def test_a_disconnect_frees_every_block_and_resuming_computes_the_tokens_again() -> None:
    async with LoopEngine().running() as engine:
        app = app_of(engine)
        first = call(app, BODY | {"max_tokens": 500})
        events = await first.arrived(5)
        assert engine.num_blocks_used
        await first.leave()
        assert engine.num_live == 0 and engine.num_blocks_used == 0
        num_steps = engine.ranks.num_steps
        for _ in range(100):
            await asyncio.sleep(0)
        assert engine.ranks.num_steps <= num_steps + 2, "nothing runs for a client that has left"
        rest = await call(app, BODY | {"max_tokens": 500}, last=id_of(events[-1])).end()
        assert joined(events + rest) == joined(await call(app, BODY | {"max_tokens": 500}, "").end())


async def test_a_second_connection_takes_over_a_stream_that_still_runs() -> None:
    """As when the first connection is half open: the server has not noticed that it broke."""
    async with LoopEngine().running() as engine:
        app, body = app_of(engine), BODY | {"max_tokens": 300}
        first = call(app, body)
        events = (await first.arrived(4))[:4]
        second = call(app, body, last=id_of(events[-1]))
        await second.arrived(1)
        await first.end()
        assert not first.complete, "the first connection has no end of the stream"
        rest = await second.end()
        assert joined(events + rest) == joined(await call(app, body, "").end())
        assert engine.num_live == 0


async def test_a_finished_stream_is_sent_again_from_any_event_without_computing() -> None:
    async with LoopEngine().running() as engine:
        app, body = app_of(engine), BODY | USAGE
        whole = await call(app, body).end()
        num_steps = engine.ranks.num_steps
        for number, event in enumerate(whole, 1):
            rest = await call(app, body, last=id_of(event)).end()
            assert joined(whole[:number] + rest) == joined(whole)
        assert joined(await call(app, body).end()) == joined(whole), "the same request again, without Last-Event-ID"
        assert engine.ranks.num_steps == num_steps


async def test_a_message_that_is_sent_again_begins_as_it_began() -> None:
    """Though the number of cached tokens is known by then."""
    body = {"messages": [{"role": "user", "content": "Hello " * 40}], "max_tokens": 8, "stream": True}
    async with LoopEngine().running() as engine:
        app = app_of(engine)
        _, first, again = [await call(app, body, key, path="/v1/messages").end() for key in ("", "a", "a")]
        assert again[0] == first[0] and b'"cache_read_input_tokens":0' not in again[-2]


async def test_two_requests_of_one_key_at_a_time_are_one_stream() -> None:
    async with LoopEngine().running() as engine:
        app = app_of(engine)
        body = BODY | {"max_tokens": 300}
        both = [call(app, body), call(app, body)]
        for one in both:
            await one.end()
        complete, other = sorted(both, key=lambda one: one.status)
        assert other.status == 409 and other.error()["code"] == "stream_taken_over"
        assert joined(complete.events) == joined(await call(app, body, "").end())


async def test_another_body_with_the_same_key_is_refused() -> None:
    async with LoopEngine().running() as engine:
        app = app_of(engine)
        events = await cut(app, BODY, "a", 2)
        for last in ("", id_of(events[-1])):
            other = call(app, BODY | {"seed": 8}, last=last)
            await other.end()
            assert other.status == 422 and other.error()["code"] == "idempotency_key_reused"


@pytest.mark.parametrize(
    "last",
    ["x", "x" * 300, "-1", "1.2.3", "1", "1.1:2", "1.1-2.2:1", "1.1-1.1:1", "2.1-1.1:1", "1e.1-2e.1:1", "1.1-2.1", "0.1-1.1:1",
     "1.25", "1.1-1.25e:1", "0.1", "3e.1"],
)  # fmt: skip
async def test_an_event_that_this_request_cannot_have_is_a_400_that_says_so(last: str) -> None:
    async with LoopEngine().running() as engine:
        answer = call(app_of(engine), BODY | {"n": 2, "echo": True, "logprobs": 0}, last=last)
        await answer.end()
        error = answer.error()
        assert answer.status == 400 and error["code"] == "invalid_parameter" and error["param"] == "Last-Event-ID"
        assert "last id" in error["message"] and last[:10] not in error["message"].partition(":")[0]
        await until("no sequence runs", lambda: _idle(engine))


@pytest.mark.parametrize("named", [{"seed": 7}, {}], ids=["the client's seed", "no seed"])
async def test_another_replica_computes_the_same_stream_again(named: dict[str, int]) -> None:
    body = {name: value for name, value in BODY.items() if name != "seed"} | named | {"temperature": 1.0, "n": 3}
    async with LoopEngine().running() as engine, LoopEngine().running() as other_engine:
        first, other = app_of(engine), app_of(other_engine)
        uncut = await call(first, body, "b" if named else "a").end()
        begun = await cut(other, body, "a", 10)
        rest = await call(first, body, "a", id_of(begun[-1])).end()
        check_ids(begun + rest)
        assert joined(begun + rest) == joined(uncut)
        strange = await call(other, body, "c").end()
        assert (joined(strange) == joined(uncut)) == bool(named), "another key has another seed"


async def test_last_event_id_needs_a_key_and_a_key_has_bounds() -> None:
    app = app_of(FakeEngine())
    answer = call(app, BODY, "", last="1")
    await answer.end()
    assert answer.status == 400 and answer.error()["param"] == "Last-Event-ID"
    for key in ("x" * 256, "a\tb"):
        answer = call(app, BODY, key)
        await answer.end()
        assert answer.status == 400 and answer.error()["param"] == "Idempotency-Key"


async def test_one_api_key_reads_no_stream_of_another() -> None:
    async with LoopEngine().running() as engine:
        app = build_http_app(engine, Metrics(in_ray=False), keys=ApiKeys(digests_of("one,two")))
        first = call(app, BODY, authorization="Bearer one")
        events = await first.arrived(3)
        await first.leave()
        unseeded = {name: value for name, value in BODY.items() if name != "seed"} | {"temperature": 1.0}
        for key, body in (("b", BODY), ("c", unseeded)):
            stranger = await call(app, body, key, authorization="Bearer two").end()
            owner = await call(app, body, key, authorization="Bearer one").end()
            assert json.loads(data_of(stranger[0]))["id"] != json.loads(data_of(owner[0]))["id"]
        assert joined(stranger) != joined(owner), "a seed of its own"
        rest = call(app, BODY, last=id_of(events[2]), authorization="Bearer one")
        assert joined(events[:3] + await rest.end()) == joined(
            await call(app, BODY, "", authorization="Bearer one").end()
        )


def test_a_stream_expires_after_its_last_reader_left() -> None:
    async def resume_and_leave() -> None:
        async with LoopEngine().running() as engine:
            app = app_of(engine, window_s=30)
            events = await cut(app, BODY, "a", 3)
            await asyncio.sleep(15)
            again = call(app, BODY, last=id_of(events[-1]))
            await again.arrived(2)
            await again.leave()
            await asyncio.sleep(20)  # later than the first end of the window
            store = store_of(app)
            assert len(store) == 1 and (await call(app, BODY, last=id_of(events[-1])).end())[0]
            await asyncio.sleep(31)
            assert not len(store) and not store.num_bytes
            assert samples(store.metrics.render())['llama_dropped_streams_total{cause="expired"}'] == 1

    with contextlib.closing(VirtualLoop()) as loop:
        loop.run_until_complete(resume_and_leave())


async def test_a_server_that_keeps_nothing_computes_the_stream_again() -> None:
    async with LoopEngine().running() as engine:
        app = app_of(engine, window_s=0)
        events = await call(app, BODY).end()
        num_steps = engine.ranks.num_steps
        assert joined(events[:9] + await call(app, BODY, last=id_of(events[8])).end()) == joined(events)
        assert engine.ranks.num_steps > num_steps
        store = store_of(app)
        assert not len(store)


async def test_a_client_that_waits_for_its_place_is_pinged_and_its_deadline_holds() -> None:
    engine = FakeEngine()
    engine.hold = asyncio.Event()
    app = build_http_app(engine, Metrics(in_ray=False), HttpLimits(ping_s=0.01))
    late = call(app, BODY, last="5", **{"x-request-timeout-seconds": "0.1"})
    await late.end()
    assert late.body.startswith(b": ping") and b"deadline_exceeded" in late.body and not engine.num_open


async def test_an_answer_that_ends_before_the_clients_place_is_refused() -> None:
    async with LoopEngine().running() as engine:
        body = BODY | {"stop_token_ids": list(range(3, 60)), "max_tokens": 500}
        for last in ("499", "400-401:1", "400-401e:1", "0e"):
            answer = call(app_of(engine), body, last=last)
            await answer.end()
            assert answer.status == 400 and answer.error()["param"] == "Last-Event-ID", last
            await until("no sequence runs", lambda: _idle(engine))


async def test_a_full_server_keeps_the_stream_for_the_next_attempt() -> None:
    async with LoopEngine(slots=1, max_waiting=1).running() as engine:
        app = app_of(engine)
        events = await cut(app, BODY, "a", 3)
        blocking = [call(app, BODY | {"max_tokens": 900}, key) for key in "bc"]
        await until("one runs and one waits", lambda: _num_live(engine, 2))
        refused = call(app, BODY, last=id_of(events[-1]))
        await refused.end()
        assert refused.status == 429
        for one in blocking:
            await one.leave()
        rest = await call(app, BODY, last=id_of(events[-1])).end()
        assert joined(events + rest) == joined(await call(app, BODY, "").end())


async def test_a_stream_that_failed_is_not_kept_and_is_computed_again() -> None:
    engine = FakeEngine()
    engine.fail_at = (3, ValueError("a bug"))
    app = app_of(engine)
    events = await call(app, BODY).end()
    assert b'"error"' in events[-1] and not id_of(events[-1]) and id_of(events[2]).startswith("3~")
    store = store_of(app)
    assert not len(store)
    engine.fail_at = None
    rest = await call(app, BODY, last=id_of(events[2])).end()
    assert joined(events[:3] + rest) == joined(await call(app, BODY, "").end())
