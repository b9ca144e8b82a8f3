"""A small OTLP/HTTP collector, which decodes what exporters send and answers as a real one does; and a server that exports
traces to it and writes its log as JSON."""

import gzip
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.support.server import API_KEYS_VARIABLE, Server, served
from tests.support.waiting import wait_until

Value = str | int | float | bool | list[str]


@dataclass(frozen=True)
class SeenSpan:
    """One span; times in nanoseconds since 1970, ids as hexadecimal digits, "" for no parent."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Value]
    events: list[tuple[str, int, dict[str, Value]]]
    links: list[str]
    is_error: bool
    message: str
    trace_state: str

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9


@dataclass
class Collector:
    """What has arrived. bodies: as received, after decompression."""

    url: str
    spans: list[SeenSpan] = field(default_factory=list)
    resources: list[dict[str, Value]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    def request(self, request_id: str, timeout_s: float = 60.0) -> SeenSpan:
        """The span of the request with this id, when it has arrived with the spans below it."""
        wait_until(f"the span of {request_id}", lambda: bool(self._requests(request_id)), timeout_s, 0.05)
        (span,) = self._requests(request_id)
        return span

    def below(self, span: SeenSpan) -> dict[str, list[SeenSpan]]:
        """The spans whose parent it is, by name."""
        found: dict[str, list[SeenSpan]] = {}
        for each in list(self.spans):
            if each.parent_id == span.span_id and each.trace_id == span.trace_id:
                found.setdefault(each.name, []).append(each)
        return found

    def named(self, name: str) -> list[SeenSpan]:
        return [span for span in list(self.spans) if span.name == name]

    def _requests(self, request_id: str) -> list[SeenSpan]:
        return [span for span in list(self.spans) if span.attributes.get("llama.request_id") == request_id]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                collector.bodies.append(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append(_values(resource.resource.attributes))
                    collector.spans += [_seen(span) for scope in resource.scope_spans for span in scope.spans]
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield collector
        finally:
            server.shutdown()


def _seen(span: Span) -> SeenSpan:
    return SeenSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        _values(span.attributes),
        [(event.name, event.time_unix_nano, _values(event.attributes)) for event in span.events],
        [link.trace_id.hex() for link in span.links],
        span.status.code == Status.STATUS_CODE_ERROR,
        span.status.message,
        span.trace_state,
    )


def _values(pairs: "list[KeyValue]") -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    if value.WhichOneof("value") == "array_value":
        return [str(_value(each)) for each in value.array_value.values]
    found: Value = getattr(value, value.WhichOneof("value") or "string_value")
    return found


_OF_RAY = (":actor_name:", ":job_id:", ":task_name:")  # marks that Ray writes into a worker's output


@dataclass(frozen=True)
class Traced:
    """A running server, its collector, and Ray's folder with all log files."""

    server: Server
    collector: Collector
    folder: Path

    def log_files(self) -> list[Path]:
        return [path for path in self.folder.glob("session_2*/logs/**/*") if path.is_file()]

    def replica_lines(self) -> list[dict[str, Any]]:
        """The lines of the replicas' log files; each must be JSON."""
        files = [path for path in self.log_files() if path.name.startswith("replica_")]
        return [json.loads(line) for path in files for line in path.read_text().splitlines()]

    def rank_lines(self) -> list[str]:
        """What the ranks have written to standard error."""
        files = [path for path in self.log_files() if path.name.startswith("worker-") and path.suffix == ".err"]
        texts = [text for path in files if ":actor_name:RankWorker" in (text := path.read_text(errors="replace"))]
        return [line for text in texts for line in text.splitlines() if line and not line.startswith(_OF_RAY)]

    def of_request(self, request_id: str) -> list[dict[str, Any]]:
        return [line for line in self.replica_lines() if line.get("request_id") == request_id]

    def with_text(self, text: str) -> list[Path]:
        """The log files that contain `text`."""
        return [path for path in self.log_files() if text.encode() in path.read_bytes()]


@contextmanager
def traced_server(api_keys: Sequence[str] = (), **args: Any) -> Iterator[Traced]:
    folder = tempfile.mkdtemp(prefix="ray-")  # Ray's sockets need a short path
    try:
        with collecting() as collector:
            env = {
                "RAY_TMPDIR": folder,
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                "OTEL_BSP_SCHEDULE_DELAY": "200",
                "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",  # a deployment that fails does so soon
            }
            if api_keys:
                env[API_KEYS_VARIABLE] = ",".join(api_keys)
                env["LLAMA_ADMIN_KEYS"] = api_keys[0]  # which reads the metrics
            with served(args={"log_format": "json"} | args, env=env) as server:
                server.wait_ready()
                yield Traced(server, collector, Path(folder) / "ray")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
