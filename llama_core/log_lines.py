"""Log lines as JSON, and the request that a line concerns. Used by every process of the server.

A line of JSON has "time" (RFC 3339, UTC), "level", "logger" and "message"; "request_id" and "trace_id" where it concerns a
request; "exception" where one was logged; and what its process adds. The JSON is ASCII, so no text can begin a line of its own.
"""

import json
import logging
import traceback
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

LogFormat = Literal["text", "json"]
LOG_FORMAT_VARIABLE: Final = "LLAMA_LOG_FORMAT"  # of the argument `log_format`; ranks inherit it

_OF_SERVE: Final = (
    "application",
    "deployment",
    "replica",
    "component_name",
    "component_id",
    "route",
)  # Serve's filters


class LogSubject(NamedTuple):
    """The request that the running task serves. trace_id: "" for one that is not traced."""

    request_id: str
    trace_id: str = ""


log_subject: ContextVar[LogSubject | None] = ContextVar("log_subject", default=None)


def current_request_id() -> str:
    """Of the running task; "" for none."""
    subject = log_subject.get()
    return "" if subject is None else subject.request_id


class SubjectFilter(logging.Filter):
    """Adds `request_id` and `trace_id` to the records of the running task's request, unless they have them. For handlers that
    are called in that task."""

    def filter(self, record: logging.LogRecord) -> bool:
        subject = log_subject.get()
        if subject is not None and not hasattr(record, "request_id"):
            record.request_id = subject.request_id
            if subject.trace_id:
                record.trace_id = subject.trace_id
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a record. fixed: added to each. A record's `fields`, a dict, are added too, and its `event` is then the
    message."""

    def __init__(self, fixed: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._fixed = dict(fixed or {})

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
        line: dict[str, object] = {
            "time": time + "Z",
            "level": record.levelname,
            "logger": record.name,
            "message": getattr(record, "event", None) or record.getMessage(),
            **self._fixed,
        }
        for name in ("request_id", "trace_id", *_OF_SERVE):
            if value := getattr(record, name, None):
                line[name] = str(value)
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)


def of_request(request_id: str) -> dict[str, str]:
    """`extra` of a line that concerns this request and is not logged in its task."""
    return {"request_id": request_id} if request_id else {}


def where(error: BaseException) -> str:
    """The type of an exception and where it was raised, over several lines. Without its message, which may repeat a prompt."""
    return "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__
