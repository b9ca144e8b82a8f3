"""OpenTelemetry's metrics of generative AI servers, exported by OTLP over HTTP as the standard OTEL_* variables say.

The names, units, bounds and attributes are those of the semantic conventions for generative AI. Interval, endpoint, headers and
temporality are the SDK's, which read its variables.
"""

import importlib.util
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from deployments.tracing.tracing import OPERATIONS

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader

log = logging.getLogger(__name__)

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_DURATION_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
CLOSE_TIMEOUT_MS: Final = 5000


class GenAiMetrics:
    """Implements `deployments.engine.metrics.RequestObserver`."""

    def __init__(self, model: str, replica: str, reader: "MetricReader | None" = None) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "llama-ray"}
        resource = Resource.create({**named, "service.instance.id": replica})
        reader = reader or PeriodicExportingMetricReader(OTLPMetricExporter())
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("llama-ray")
        self._fixed = {
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.provider.name": "llama-ray",
        }
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "From a request's arrival to its last token",
            explicit_bucket_boundaries_advisory=_DURATION_S,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "From a request's arrival to its first token",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN_S,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "A request's mean time for a token after the first",
            explicit_bucket_boundaries_advisory=_TOKEN_S,
        )

    def ended(self, path: str, outcome: str, total_s: float, ttft_s: float | None, num_tokens: int) -> None:
        operation = OPERATIONS.get(path, path.rpartition("/")[2])
        attributes = {**self._fixed, "gen_ai.operation.name": operation}
        if outcome != "ok":
            self._duration.record(total_s, {**attributes, "error.type": outcome})
            return
        self._duration.record(total_s, attributes)
        if ttft_s is not None:
            self._first_token.record(ttft_s, attributes)
            if num_tokens > 1:
                self._per_token.record((total_s - ttft_s) / (num_tokens - 1), attributes)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown(CLOSE_TIMEOUT_MS)


def open_metrics(model: str, replica: str) -> GenAiMetrics | None:
    """None unless the OTEL_* variables ask for metrics. Warns if they ask for what this server cannot do."""
    if not is_asked_for(os.environ):
        return None
    protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), "http/protobuf")
    if protocol != "http/protobuf":
        log.warning("no OpenTelemetry metrics: OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf")
        return None
    if importlib.util.find_spec("opentelemetry.exporter") is None:
        log.warning("no OpenTelemetry metrics: the exporter is not installed: pip install .[otlp]")
        return None
    return GenAiMetrics(model, replica)


def is_asked_for(environment: Mapping[str, str]) -> bool:
    """Whether the variables name an endpoint, and neither the SDK nor the exporter is turned off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_METRICS_EXPORTER", "otlp").strip() in ("none", ""):
        return False
    return any(environment.get(name) for name in ENDPOINTS)
