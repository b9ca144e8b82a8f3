"""Exports spans by OTLP over HTTP, as the standard OTEL_* variables say. The only module that imports OpenTelemetry.

Spans are made once, at the end of a request, directly as the SDK's `ReadableSpan`: through its tracer a request's spans cost
ten times as much. Sampler, propagators, resource, batches, endpoint and headers are the SDK's, which read its variables.
"""

import os
import time
from collections.abc import Mapping, Sequence
from typing import Final

from opentelemetry import propagate, trace
from opentelemetry.context import get_current
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from deployments.observe.span import Attributes, Span, TraceContext

SCOPE: Final = InstrumentationScope("llama-ray")
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_OK: Final = Status(StatusCode.UNSET)


class OtlpSink:
    """Implements `deployments.observe.span.SpanSink`. attributes: of the resource, beside those of OTEL_RESOURCE_ATTRIBUTES."""

    def __init__(self, attributes: Attributes, processor: SpanProcessor | None = None) -> None:
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "llama-ray"}
        # Its own provider, not the process's: Ray Serve may have set that one up for spans of its own.
        self._provider = TracerProvider(resource=Resource.create({**named, **attributes}), shutdown_on_exit=False)
        self._processor = processor or BatchSpanProcessor(OTLPSpanExporter())
        self._provider.add_span_processor(self._processor)
        self._ids = self._provider.id_generator
        self._links: Sequence[Link] = ()

    def begin(self, name: str, headers: Mapping[str, str]) -> TraceContext | None:
        context = get_current()  # Ray Serve's span, where its tracing is on
        parent = trace.get_current_span(context).get_span_context()
        if not parent.is_valid:
            context = propagate.extract(headers)
            parent = trace.get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else self._ids.generate_trace_id()
        result = self._provider.sampler.should_sample(context, trace_id, name, SpanKind.SERVER)
        if result.decision is not Decision.RECORD_AND_SAMPLE:
            return None
        return TraceContext(trace_id, parent.span_id, tuple((result.trace_state or TraceState()).items()))

    def emit(self, context: TraceContext, root: Span, children: Sequence[Span]) -> None:
        self._emit(context, root, children, self._links)

    def emit_start(self, root: Span, children: Sequence[Span]) -> None:
        if (context := self.begin(root.name, {})) is not None:
            self._links = (Link(self._emit(context, root, children, ())),)

    def _emit(self, context: TraceContext, root: Span, children: Sequence[Span], links: Sequence[Link]) -> SpanContext:
        offset_ns = time.time_ns() - time.monotonic_ns()
        state = TraceState(list(context.trace_state)) if context.trace_state else None
        own = SpanContext(context.trace_id, self._ids.generate_span_id(), False, _SAMPLED, state)
        parent = None
        if context.parent_id:
            parent = SpanContext(context.trace_id, context.parent_id, True, _SAMPLED, state)
        for child in children:
            child_context = SpanContext(context.trace_id, self._ids.generate_span_id(), False, _SAMPLED, state)
            self._end(child, child_context, own, SpanKind.INTERNAL, offset_ns)
        self._end(root, own, parent, SpanKind.SERVER, offset_ns, links)
        return own

    def close(self) -> None:
        self._processor.shutdown()

    def _end(
        self,
        span: Span,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        offset_ns: int,
        links: Sequence[Link] = (),
    ) -> None:
        self._processor.on_end(
            ReadableSpan(
                span.name,
                context,
                parent,
                self._provider.resource,
                span.attributes,
                [SdkEvent(event.name, event.attributes, int(event.at_s * 1e9) + offset_ns) for event in span.events],
                links,
                kind,
                status=_OK if span.error is None else Status(StatusCode.ERROR, span.error),
                start_time=int(span.began_s * 1e9) + offset_ns,
                end_time=int(span.ended_s * 1e9) + offset_ns,
                instrumentation_scope=SCOPE,
            )
        )
