"""Streams: the shape of their events, their errors, and their end when the client disconnects or stops reading."""

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from deployments.http.app import build_http_app
from deployments.http.choices import submitted
from deployments.http.limits import HttpLimits
from deployments.observe.metrics import Metrics
from deployments.openai.plan import Plan
from llama_core.errors import NonFiniteLogits
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support import http
from tests.support.asgi_client import AsgiCall
from tests.support.http import samples
from tests.support.scripted_engine import MODEL_ID, FakeEngine, Served, canary, eventually, serve, sse

PING_S = 0.05


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(FakeEngine("One 🙂 two, three."), HttpLimits(ping_s=PING_S, send_timeout_s=0.5)) as running:
        yield running
        running.engine.fail_at = running.engine.hold = None
        running.engine.step_s = 0
        running.engine.answer = "Still here."
        canary(running)


def chat(served: Served, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True} | fields
    return http.post(served.url + "/v1/chat/completions", json=body)


def completion(served: Served, **fields: Any) -> httpx.Response:
    return http.post(served.url + "/v1/completions", json={"prompt": "x", "stream": True} | fields)


def test_a_stream_is_never_cached_or_buffered(served: Served) -> None:
    answer = chat(served)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_role_comes_with_the_first_token_and_one_finish_reason_at_the_end(served: Served) -> None:
    chunks = sse(chat(served).text)
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * len(chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [("role" in delta) for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks) and len({chunk["id"] for chunk in chunks}) == 1


FIRST_EVENTS: dict[str, list[str]] = {
    "/v1/responses": ["response.created", "response.in_progress"],
    "/v1/messages": ["message_start"],
}


@pytest.mark.parametrize("path", FIRST_EVENTS)
async def test_typed_events_begin_before_the_first_token(path: str) -> None:
    """Agents wait for events, and a long prompt takes seconds."""
    engine = FakeEngine()
    engine.hold = asyncio.Event()
    call = streaming(engine, path)
    expected = FIRST_EVENTS[path]
    assert types_of(await call.arrived(len(expected))) == expected and call.status == 200
    assert engine.num_open == 1 and not call.ended, "the first token has not come"
    engine.hold.set()
    kinds = types_of(await call.end())
    assert kinds[: len(expected)] == expected and len(kinds) > 5
    assert all(kinds.count(kind) == 1 for kind in expected)


@pytest.mark.parametrize("path", FIRST_EVENTS)
async def test_an_error_after_the_beginning_is_an_event_and_an_earlier_one_a_status(path: str) -> None:
    engine = FakeEngine()
    engine.fail_at = (0, NonFiniteLogits("the model computed NaN"))
    call = streaming(engine, path)
    last = "response.failed" if path == "/v1/responses" else "error"
    assert types_of(await call.end()) == [*FIRST_EVENTS[path], last] and call.complete
    assert b'"message":"the model computed NaN"' in call.events[-1]
    engine.max_streams = 0
    refused = streaming(engine, path)
    await refused.end()
    assert refused.status == 429 and refused.error()["type"] == "rate_limit_error"


def streaming(engine: FakeEngine, path: str) -> AsgiCall:
    asks = (
        {"input": "hi"}
        if path == "/v1/responses"
        else {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    )
    return AsgiCall(build_http_app(engine, Metrics(in_ray=False)), path, asks | {"stream": True}, {})


def types_of(events: list[bytes]) -> list[str]:
    return [event.partition(b"\n")[0].removeprefix(b"event: ").decode() for event in events]


def test_an_emoji_split_over_tokens_is_never_half_a_character(served: Served) -> None:
    chunks = sse(chat(served).text)
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == "One 🙂 two, three."
    assert any(text.endswith("🙂") for text in texts)
    assert not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize("stop", [" two", "🙂 two,", "e", ["nothing", "three."]])
def test_a_stop_string_never_shows_streamed_or_not(served: Served, stop: str | list[str]) -> None:
    whole = completion(served, stop=stop, stream=False, max_tokens=100).json()["choices"][0]
    chunks = sse(completion(served, stop=stop, max_tokens=100).text)
    streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    first = min((stop if isinstance(stop, list) else [stop]), key=lambda s: (" One 🙂 two, three." + s).index(s))
    assert whole["text"] == streamed == " One 🙂 two, three.".partition(first)[0]
    last = chunks[-1]["choices"][0]
    assert whole["finish_reason"] == last["finish_reason"] == "stop"
    assert whole["stop_reason"] == last["stop_reason"] == (stop if isinstance(stop, str) else "three.")


def test_usage_comes_last_or_with_every_chunk(served: Served) -> None:
    *parts, last = sse(chat(served, stream_options={"include_usage": True}).text)
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    num_tokens = last["usage"]["completion_tokens"]
    assert num_tokens == len(served.engine.streams[-1].answer)
    parts = sse(chat(served, stream_options={"continuous_usage_stats": True}).text)
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == list(range(1, num_tokens + 1))


def test_an_error_after_the_first_token_ends_the_stream_without_done(served: Served) -> None:
    served.engine.fail_at = (3, NonFiniteLogits("the model computed NaN for this request"))
    answer = completion(served, n=2)
    assert answer.status_code == 200
    assert "[DONE]" not in answer.text
    last = json.loads(answer.text.strip().rpartition("\n\n")[2].removeprefix("data: "))
    assert last["error"]["code"] == "non_finite_logits"
    assert set(last["error"]) == {"message", "type", "param", "code"}
    eventually(lambda: served.engine.num_open == 0)


def test_the_openai_package_raises_on_an_error_in_a_stream(served: Served) -> None:
    served.engine.fail_at = (3, RuntimeError("secret"))
    with openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(model=MODEL_ID, prompt="x", stream=True)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
    assert "secret" not in str(caught.value)


def test_an_idle_stream_pings_and_clients_ignore_the_pings(served: Served) -> None:
    served.engine.step_s = 3 * PING_S
    with openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as client:
        parts = client.completions.create(model=MODEL_ID, prompt="x", max_tokens=3, stream=True)
        assert len(list(parts)) == 3
    assert ": ping\n\n" in completion(served, max_tokens=3).text


def num_cancelled(served: Served) -> float:
    return samples(served.metrics.render()).get('llama_requests_total{outcome="cancelled",path="/v1/completions"}', 0)


def test_a_disconnect_in_a_stream_frees_every_sequence(served: Served) -> None:
    served.engine.answer, served.engine.step_s = "word " * 40, 0.05
    body = {"prompt": "x", "stream": True, "n": 3, "max_tokens": 200, "ignore_eos": True}
    with http.stream("POST", served.url + "/v1/completions", json=body) as answer:
        texts = answer.iter_text()  # kept: dropping the iterator would disconnect
        next(texts)
        assert served.engine.num_open == 3
    eventually(lambda: served.engine.num_open == 0)
    assert all(stream.cancelled for stream in served.engine.streams)
    eventually(lambda: num_cancelled(served) == 1)


@contextlib.contextmanager
def asked(served: Served, body: dict[str, Any], num_streams: int) -> Iterator[None]:
    """By a client that reads nothing: the engine has the request's sequences. It disconnects at the end."""
    raw = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.port))
        client.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n{raw}".encode())
        eventually(lambda: len(served.engine.streams) == num_streams)
        yield


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_before_the_first_token_frees_every_sequence(served: Served, stream: bool) -> None:
    served.engine.hold = asyncio.Event()
    with asked(served, {"prompt": "x", "stream": stream, "n": 2}, 2):
        pass
    eventually(lambda: served.engine.num_open == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_disconnected(
    served: Served, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served.engine.answer = "word " * 40
    with asked(
        served, {"prompt": "x", "stream": stream, "n": 100, "max_tokens": 250, "logprobs": 20, "ignore_eos": True}, 100
    ):
        eventually(lambda: num_cancelled(served) == 1)
    assert served.engine.num_open == 0 and any(stream.cancelled for stream in served.engine.streams) == stream
    assert f"a client did not read its {'stream' if stream else 'answer'} for 0.5 s" in caplog.text


async def test_unread_deltas_of_a_slow_reader_stay_in_the_engine() -> None:
    engine = FakeEngine("word " * 40)
    prompt, params = [5], SamplingParams(max_tokens=100)
    choices = await submitted(engine, Plan(Request([prompt], [params], n=2)))
    for _ in range(200):
        await asyncio.sleep(0)
    assert all(stream.num_asked <= 4 for stream in engine.streams)
    seen = 0
    while choices.num_open and await choices.wait():
        while choices.take() is not None:
            seen += 1
    assert seen == sum(stream.num_asked for stream in engine.streams)
    choices.cancel()
