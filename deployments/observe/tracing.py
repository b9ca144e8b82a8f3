"""Traces of one replica: opened from the standard OTEL_* variables, handed to each request that is sampled.

Knows OpenTelemetry only as a `SpanSink`.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from cluster.driver.group_info import GroupInfo
from cluster.driver.stragglers import StepWindow
from deployments.engine.interface import EngineState, RankState
from deployments.engine.supervisor import Replacement
from deployments.observe.request_trace import RankFacts, RequestTrace
from deployments.observe.span import Attributes, Span, SpanSink, Value

log = logging.getLogger(__name__)

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
# Of the GenAI conventions, by route and by method of the handle. Others have names of their own: "score", "generate".
OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "chat_completion": "chat",
}
REFRESH_S: Final = 5.0  # the ranks' times are measured as often
CLOSE_TIMEOUT_S: Final = 5.0


class TracedEngine(Protocol):
    """What a trace tells of the engine. Implemented by `LlamaService` and `Fleet`."""

    @property
    def info(self) -> GroupInfo | None: ...
    @property
    def step_window(self) -> StepWindow: ...
    @property
    def replacements(self) -> Sequence[Replacement]: ...
    def describe(self) -> EngineState: ...


class Tracing:
    """`begin` for each request; `ranks_started` when ranks serve; `close` at the end."""

    def __init__(self, sink: SpanSink, engine: TracedEngine, model: str) -> None:
        self._sink = sink
        self._engine = engine
        self._model = model
        self._began_s = time.monotonic()
        self._epoch: int | None = None
        self._facts = RankFacts()
        self._refreshed_s = 0.0

    def begin(self, operation: str, attributes: Attributes, headers: Mapping[str, str]) -> RequestTrace | None:
        """None for a request that is not sampled. headers: of HTTP; those of W3C name the parent."""
        name = f"{operation} {self._model}"
        if (context := self._sink.begin(name, headers)) is None:
            return None
        fixed = {"gen_ai.operation.name": operation, "gen_ai.request.model": self._model}
        return RequestTrace(name, context, self._sink, self._current_facts, {**fixed, **attributes})

    def begin_http(self, path: str, request_id: str, headers: Mapping[str, str]) -> RequestTrace | None:
        """`begin` for a generation route."""
        attributes = {"llama.request_id": request_id, "http.route": path}
        return self.begin(OPERATIONS.get(path, path.rpartition("/")[2]), attributes, headers)

    def begin_call(self, method: str, request_id: str) -> RequestTrace | None:
        """`begin` for a call by Serve handle: the parent is Serve's span, where Serve's tracing is on."""
        attributes = {"llama.request_id": request_id, "rpc.method": method}
        return self.begin(OPERATIONS.get(method, method), attributes, {})

    def ranks_started(self) -> None:
        """The trace of the latest start of the ranks: their first one, or one after a failure."""
        info = self._engine.info
        if info is None or info.epoch == self._epoch:
            return
        began_s, ended_s = self._began_s, time.monotonic()
        for replacement in self._engine.replacements:
            if replacement.epoch == info.epoch:
                began_s, ended_s = replacement.failed_s, replacement.resumed_s
        self._epoch = info.epoch
        attributes: dict[str, Value] = {"gen_ai.request.model": self._model, "llama.epoch": info.epoch}
        attributes["llama.ranks"] = len(info.ranks)
        self._sink.emit_start(Span("build/init", began_s, ended_s, attributes), _loads(info))

    async def close(self) -> None:
        """Export what is left, for `CLOSE_TIMEOUT_S` at most."""
        # A daemon, because the SDK keeps trying a collector that does not answer for longer.
        closing = threading.Thread(target=self._sink.close, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, CLOSE_TIMEOUT_S)

    def _current_facts(self) -> RankFacts:
        now_s = time.monotonic()
        info = self._engine.info
        if now_s - self._refreshed_s > REFRESH_S or (info is not None and info.epoch != self._epoch):
            self._refreshed_s = now_s
            self.ranks_started()
            window = self._engine.step_window
            ranks = [_share(state, window) for state in self._engine.describe().ranks]
            self._facts = RankFacts(ranks, window.sample_ms)
        return self._facts._replace(replacements=self._engine.replacements)


def open_tracing(engine: TracedEngine, model: str, replica: str) -> Tracing | None:
    """None unless the OTEL_* variables ask for traces. Warns if they ask for what this server cannot do."""
    if not is_asked_for(os.environ):
        return None
    protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        log.warning("no traces: OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf")
        return None
    try:
        from deployments.observe.otlp import OtlpSink
    except ImportError as error:
        log.warning("no traces: OTEL_EXPORTER_OTLP_ENDPOINT needs %s: pip install 'llama-on-ray[otlp]'", error.name)
        return None
    return Tracing(OtlpSink({"service.instance.id": replica}), engine, model)


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether the variables name an endpoint, and neither the SDK nor the exporter is turned off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() in ("none", ""):
        return False
    return any(environment.get(name) for name in ENDPOINTS)


def _share(state: RankState, window: StepWindow) -> Attributes:
    """A rank's part of the model, and of a step's time where that is measured."""
    share: dict[str, Value] = {"llama.rank": state.rank, "llama.rank.share": state.share}
    if (step_ms := window.compute_ms.get(state.rank)) is not None:
        share["llama.rank.step_ms"] = step_ms
    return share


def _loads(info: GroupInfo) -> list[Span]:
    """One span for each rank, which ends when all ranks had their weights."""
    return [
        Span(
            "load_checkpoints",
            info.loaded_s - report.load_seconds,
            info.loaded_s,
            {
                "llama.rank": report.rank,
                "llama.rank.weight_bytes": report.weight_bytes,
                "llama.rank.device": report.device,
            },
        )
        for report in info.ranks
    ]
