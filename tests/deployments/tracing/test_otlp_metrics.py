"""OpenTelemetry's metrics: names, units and attributes of the conventions, and their export over HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader

from deployments.engine.metrics import Metrics
from deployments.tracing.otlp_metrics import GenAiMetrics, is_asked_for, open_metrics
from llama_core.errors import QueueFull


def test_requests_are_recorded_by_operation_and_outcome() -> None:
    reader = InMemoryMetricReader()
    metrics = Metrics(model_name="tiny", in_ray=False)
    metrics.observer = GenAiMetrics("tiny", "replica-1", reader)
    metrics.request_ended("/v1/chat/completions", "ok", 2.0, 0.5, 4)
    metrics.request_ended("/v1/completions", "ok", 1.0, 1.0, 1)
    metrics.request_ended("/v1/completions", "ok", 1.0, 0.25, 2)
    metrics.request_ended("/v1/completions", "queue_full", 0.1, None, 0, QueueFull("full"))
    data = reader.get_metrics_data()
    assert data is not None
    found = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    points = {
        (name, point.attributes["gen_ai.operation.name"], point.attributes.get("error.type")): (point.count, point.sum)
        for name, metric in found.items()
        for point in metric.data.data_points
        if isinstance(point, HistogramDataPoint) and point.attributes is not None
    }
    assert points == {
        ("gen_ai.server.request.duration", "chat", None): (1, 2.0),
        ("gen_ai.server.request.duration", "text_completion", None): (2, 2.0),
        ("gen_ai.server.request.duration", "text_completion", "queue_full"): (1, 0.1),
        ("gen_ai.server.time_to_first_token", "chat", None): (1, 0.5),
        ("gen_ai.server.time_to_first_token", "text_completion", None): (2, 1.25),
        ("gen_ai.server.time_per_output_token", "chat", None): (1, 0.5),
        ("gen_ai.server.time_per_output_token", "text_completion", None): (1, 0.75),
    }
    assert {metric.unit for metric in found.values()} == {"s"}
    assert data.resource_metrics[0].resource.attributes["service.instance.id"] == "replica-1"


def test_metrics_are_exported_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[tuple[str, ExportMetricsServiceRequest]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportMetricsServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    exported = open_metrics("tiny", "replica-1")
    assert exported is not None
    exported.ended("/v1/chat/completions", "ok", 2.0, 0.5, 4)
    exported.close()
    server.shutdown()
    server.server_close()
    path, request = received[-1]
    names = {metric.name for metric in request.resource_metrics[0].scope_metrics[0].metrics}
    assert path == "/v1/metrics" and "gen_ai.server.time_to_first_token" in names


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_METRICS_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_environment_asks_for_metrics(environment: dict[str, str], asked: bool) -> None:
    assert is_asked_for(environment) is asked
