"""Where a replica's log lines go, and in which format."""

import asyncio
import logging
from collections.abc import Sequence
from logging.handlers import MemoryHandler

from llama_core.errors import LlamaError
from llama_core.log_lines import JsonFormatter, LogFormat, SubjectFilter, where

BATCH_S = 0.25
MOST_IN_A_BATCH = 32  # about a millisecond
OURS = ("llama_core", "cluster", "deployments", "opentelemetry")


class WithoutLoggedErrors(logging.Filter):
    """For Serve's logger, which logs each exception of a call as an ERROR with a traceback. Errors of the LlamaError tree have
    had their line in the request log, which says whether the caller or the server is at fault. Of others the line keeps the
    type and the place: their message may repeat a prompt.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        if isinstance(error, LlamaError):
            return False
        if record.getMessage().startswith("Request failed"):
            record.msg, record.args = "Request failed.\n%s", (where(error),)
            record.exc_info = record.exc_text = None
        return True


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


class Batched(PassedOn):
    """Passes records to other handlers in batches, at most BATCH_S later. A batch takes a third of the time
    of single lines, which would find cold processor caches between two tokens. An error is passed on at once, after earlier
    records.
    """

    def __init__(self, targets: Sequence[logging.Handler]) -> None:
        super().__init__(targets)
        self._records: list[logging.LogRecord] = []
        self._timer: asyncio.TimerHandle | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # without a loop, no timer would flush the batch
            self.flush()
            return
        if record.levelno >= logging.ERROR or len(self._records) >= MOST_IN_A_BATCH:
            self.flush()
        elif self._timer is None:
            self._timer = loop.call_later(BATCH_S, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        records, self._records = self._records, []
        for record in records:
            super().emit(record)


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
    logging.getLogger("llama").handlers = [Batched(serve_log.handlers)]


def _writer(handler: logging.Handler) -> logging.Handler:
    """The handler that formats: Serve buffers the lines of its file."""
    return handler.target if isinstance(handler, MemoryHandler) and handler.target is not None else handler
