"""Spans as plain data, and what takes them. Times are those of time.monotonic."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]
NO_ATTRIBUTES: Final[Attributes] = MappingProxyType({})


class Event(NamedTuple):
    name: str
    at_s: float
    attributes: Attributes


class Span(NamedTuple):
    """error: a code where the work failed; it becomes the span's status."""

    name: str
    began_s: float
    ended_s: float
    attributes: Attributes = NO_ATTRIBUTES
    events: Sequence[Event] = ()
    error: str | None = None


class TraceContext(NamedTuple):
    """The identity of one trace that is sampled. parent_id: the caller's span; 0 for none. trace_state: W3C's, as received."""

    trace_id: int
    parent_id: int
    trace_state: Sequence[tuple[str, str]] = ()

    @property
    def trace_hex(self) -> str:
        return f"{self.trace_id:032x}"


class SpanSink(Protocol):
    """Implemented by `otlp.OtlpSink`."""

    def begin(self, name: str, headers: Mapping[str, str]) -> TraceContext | None:
        """The context for a new span below the current one, or below that of W3C's headers; None if it is not sampled."""

    def emit(self, context: TraceContext, root: Span, children: Sequence[Span]) -> None:
        """Never waits, and never raises."""

    def emit_start(self, root: Span, children: Sequence[Span]) -> None:
        """A trace of its own, of a start of the ranks; root spans that come later are linked to it."""

    def close(self) -> None:
        """Export what is left. Where nothing takes the spans, this waits long."""
