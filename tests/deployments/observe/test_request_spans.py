"""The spans of requests, as a collector gets them: engine loop and HTTP application over fake ranks, exported by OTLP."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from opentelemetry import context, trace

from deployments.args import ServerArgs
from deployments.engine.service import LlamaService
from deployments.fleet.own_engine import OwnEngine
from deployments.handle.api import HandleApi
from deployments.http.app import build_http_app
from deployments.observe.metrics import Metrics
from deployments.observe.tracing import Tracing, open_tracing
from llama_core.errors import InvalidParameter
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support.fake_rank_group import FakeGroup, FakeGroupPool
from tests.support.otlp_collector import Collector, SeenSpan, collecting

STAGES = {"queue", "tokenize_encode", "prefill_forward", "decode_step_forward", "sample_top_p", "decode_decode"}
CHOICE = STAGES - {"tokenize_encode"}
SECRET = "xylophone"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def steady(tokens: list[int]) -> int:
    """A next token that is never EOS."""
    return 3 + hash(tuple(tokens)) % 500


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "HEADERS"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with collecting() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


class Running:
    """A service over fake ranks, its HTTP application's client, and its API by handle."""

    def __init__(self, service: OwnEngine, groups: FakeGroupPool, tracing: Tracing | None) -> None:
        self.service, self.groups, self.tracing = service, groups, tracing
        metrics = Metrics(in_ray=False)
        app = build_http_app(service, metrics, tracing=tracing)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
        self.handle = HandleApi()
        self.handle.service, self.handle.metrics, self.handle.tracing = service, metrics, tracing

    async def post(self, path: str, request_id: str, headers: dict[str, str] | None = None, **body: Any) -> int:
        head = {"x-request-id": request_id} | (headers or {})
        answer = await self.client.post(path, json=body, headers=head)
        return answer.status_code


@asynccontextmanager
async def running(step_s: float = 0.001) -> AsyncIterator[Running]:
    groups = FakeGroupPool(lambda: FakeGroup(token=steady, step_s=step_s))
    args = ServerArgs(ckpt_dir=str(GOLDEN / "mp2"), max_seq_len=128, max_batch_size=8, recovery_timeout_s=60)
    service = OwnEngine(LlamaService(args, groups), args)
    tracing = open_tracing(service.service, args.model_id, "replica-1")
    await service.start()
    made = Running(service, groups, tracing)
    try:
        yield made
    finally:
        await made.client.aclose()
        await service.stop()
        if tracing is not None:
            await tracing.close()


async def seen(collector: Collector, request_id: str) -> tuple[SeenSpan, dict[str, list[SeenSpan]]]:
    span = await asyncio.to_thread(collector.request, request_id)
    return span, collector.below(span)


async def test_a_streamed_chat_has_its_stages_below_one_span(collector: Collector) -> None:
    before_ns = time.time_ns()
    async with running() as server:
        messages = [{"role": "user", "content": f"the {SECRET}"}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": 20, "temperature": 0.5, "stream": True}
        assert await server.post("/v1/chat/completions", "chat-1", **body) == 200
        span, below = await seen(collector, "chat-1")
    assert span.name == "chat llama-demo" and span.parent_id == "" and not span.is_error
    assert {name: len(spans) for name, spans in below.items()} == dict.fromkeys([*STAGES, "stream"], 1)
    attributes = span.attributes
    assert attributes["gen_ai.operation.name"] == "chat" and attributes["gen_ai.request.model"] == "llama-demo"
    assert attributes["gen_ai.request.max_tokens"] == 20 and attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.usage.output_tokens"] == 20 and attributes["gen_ai.request.stream"] is True
    assert attributes["gen_ai.usage.input_tokens"] > 3  # type: ignore[operator]
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    one = {name: spans[0] for name, spans in below.items()}
    order = [one[name] for name in ("tokenize_encode", "queue", "prefill_forward", "decode_step_forward")]
    for before, after in itertools.pairwise(order):
        assert span.began_ns <= before.began_ns <= before.ended_ns <= after.began_ns + 1000
    assert one["decode_step_forward"].ended_ns <= span.ended_ns and one["stream"].ended_ns == span.ended_ns
    assert one["decode_step_forward"].attributes["llama.steps"] == 19
    assert one["decode_step_forward"].seconds >= 0.019, "19 steps of a millisecond"
    assert before_ns < span.began_ns < span.ended_ns < time.time_ns(), "by the wall clock"
    assert 0 < one["decode_decode"].seconds < one["decode_step_forward"].seconds
    assert not any(SECRET.encode() in body for body in collector.bodies), "no text of a prompt is exported"


async def test_the_context_of_w3c_headers_is_continued(collector: Collector) -> None:
    async with running() as server:
        sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=abc"}
        assert await server.post("/v1/completions", "child", sampled, prompt="once", max_tokens=2) == 200
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert await server.post("/v1/completions", "unsampled", unsampled, prompt="once", max_tokens=2) == 200
        invalid = {"traceparent": "00-zz"}
        assert await server.post("/v1/completions", "root", invalid, prompt="once", max_tokens=2) == 200
        child, below = await seen(collector, "child")
        root, _ = await seen(collector, "root")
    assert (child.trace_id, child.parent_id, child.trace_state) == (TRACE, PARENT, "vendor=abc")
    assert {span.trace_id for spans in below.values() for span in spans} == {TRACE}
    assert root.parent_id == "" and root.trace_id != TRACE
    assert "unsampled" not in {span.attributes.get("llama.request_id") for span in collector.spans}


async def test_calls_by_handle_are_traced_below_serves_span(collector: Collector) -> None:
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    parent = trace.SpanContext(int(TRACE, 16), int(PARENT, 16), is_remote=True, trace_flags=flags)
    async with running() as server:
        token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(parent)))
        try:
            await server.handle.sample(["once", "twice"], SamplingParams(0.7, max_tokens=3), request_id="call")
            with pytest.raises(InvalidParameter):
                await server.handle.sample([[]], SamplingParams(max_tokens=3), request_id="bad")
        finally:
            context.detach(token)
        span, below = await seen(collector, "call")
        bad, _ = await seen(collector, "bad")
    assert (span.trace_id, span.parent_id, span.name) == (TRACE, PARENT, "sample llama-demo")
    assert {name: len(spans) for name, spans in below.items()} == dict.fromkeys(CHOICE, 2)
    assert span.attributes["gen_ai.request.max_tokens"] == 3 and span.attributes["gen_ai.request.temperature"] == 0.7
    assert bad.is_error and bad.message == "invalid_parameter"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")],
)
async def test_traces_are_off_where_a_variable_says_so(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    async with running() as server:
        assert server.tracing is None
        assert await server.post("/v1/completions", "off", prompt="once", max_tokens=2) == 200


async def test_a_dead_collector_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setattr("deployments.observe.tracing.CLOSE_TIMEOUT_S", 0.2)
    async with running() as server:
        for number in range(5):
            assert await server.post("/v1/completions", f"r{number}", prompt="once", max_tokens=2) == 200
