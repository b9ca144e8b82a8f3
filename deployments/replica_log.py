"""Where a replica's log lines go, and in which format."""

import logging
from collections.abc import Sequence
from logging.handlers import MemoryHandler

from deployments.handle_call import WithoutLoggedErrors
from deployments.http.request_log import Batched
from llama_core.log_lines import JsonFormatter, LogFormat, SubjectFilter

OURS = ("llama_core", "cluster", "deployments", "opentelemetry")


class PassedOn(logging.Handler):
    """Passes each record to other handlers, with the request that it concerns."""

    def __init__(self, targets: Sequence[logging.Handler]) -> None:
        super().__init__()
        self._targets = targets
        self.addFilter(SubjectFilter())

    def emit(self, record: logging.LogRecord) -> None:
        for target in self._targets:
            if record.levelno >= target.level:
                target.handle(record)


def log_like_serve(log_format: LogFormat = "text") -> None:
    """Send our log lines, from INFO up, where Serve's own go: the replica's log file and its standard error. "json": all
    lines there, Serve's too, are JSON."""
    serve_log = logging.getLogger("ray.serve")
    serve_log.addFilter(WithoutLoggedErrors())
    if log_format == "json":
        for handler in serve_log.handlers:
            _writer(handler).setFormatter(JsonFormatter())
    for name in ("llama", *OURS):
        ours = logging.getLogger(name)
        ours.setLevel(logging.INFO if name != "opentelemetry" else logging.WARNING)
        ours.handlers = [PassedOn(serve_log.handlers)]
        ours.propagate = False
    requests = Batched(serve_log.handlers)
    requests.addFilter(SubjectFilter())
    logging.getLogger("llama").handlers = [requests]


def _writer(handler: logging.Handler) -> logging.Handler:
    """The handler that formats: Serve buffers the lines of its file."""
    return handler.target if isinstance(handler, MemoryHandler) and handler.target is not None else handler
