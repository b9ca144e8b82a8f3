"""The streams of the sequences that have not ended: what a step has gained reaches their readers, and each ends once.

Knows nothing of the ranks, nor of when steps are made.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from deployments.engine.retry_after import RetryEstimate
from deployments.engine.step_report import Intervals
from deployments.engine.timeline import Timeline
from llama_core.errors import EngineError, LlamaError, RequestAborted
from llama_core.log_lines import of_request, where
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


class TokenSink(Protocol):
    """What gets the tokens of one sequence: a `SequenceStream` in this process, or a front's stream."""

    sequence: Sequence
    timeline: Timeline

    def admitted(self, now_s: float) -> None:
        """The sequence is in the batch, for the first time, by time.monotonic."""

    def push(self, tokens: list[int]) -> bool:
        """The tokens that the sequence has gained; none when it ended without one. True if its text has a stop string."""

    def fail(self, error: LlamaError) -> None: ...
    def end(self, error: LlamaError) -> None: ...


class LiveStreams:
    """The streams by their sequences. `idle` is set while there is no stream."""

    def __init__(self, scheduler: Scheduler, retry: RetryEstimate, on_end: Callable[[TokenSink], None]) -> None:
        """on_end: for metrics, of ended sequences."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._scheduler = scheduler
        self._retry = retry
        self._on_end = on_end
        self._streams: dict[Sequence, TokenSink] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, seq: Sequence) -> TokenSink | None:
        return self._streams.get(seq)

    def add(self, stream: TokenSink) -> bool:
        """The scheduler has the stream's sequence. False if that has ended already."""
        if stream.sequence.finished:
            stream.push([])
            self._end(stream)
            return False
        self._streams[stream.sequence] = stream
        self.idle.clear()
        return True

    def drop(self, seq: Sequence) -> TokenSink | None:
        """Forget the stream of a sequence that has ended."""
        stream = self._streams.pop(seq, None)
        if stream is not None:
            self._end(stream)
        if not self._streams:
            self.idle.set()
        return stream

    def cancel(self, seq: Sequence) -> None:
        if seq in self._streams:
            self._scheduler.finish(seq, FinishReason.ABORT)
            self.drop(seq)

    def abort(self, request_id: str) -> int:
        """End every sequence of the request with this id. Returns their number."""
        found = [stream for seq, stream in self._streams.items() if seq.request_id == request_id]
        for stream in found:
            stream.end(RequestAborted("This request was aborted by its id."))
        return len(found)

    def fail(self, error: EngineError) -> None:
        """End every sequence with `error`."""
        for seq, stream in list(self._streams.items()):
            self._scheduler.finish(seq, FinishReason.ERROR)
            stream.fail(error)
            self.drop(seq)

    def deliver(self, gained: dict[Sequence, list[int]], now_s: float, elapsed_ms: float) -> Intervals:
        """Give readers the tokens of a step that was completed at `now_s`, by time.monotonic, in `elapsed_ms`.

        Returns pairs for the time between tokens: seconds per token since a sequence's previous tokens, and how many tokens had
        this time. A sequence's first tokens have no previous ones and are left out."""
        intervals: dict[float, int] = {}
        for seq, tokens in gained.items():
            stream = self._streams.get(seq)
            if stream is None:
                continue
            if tokens and (seconds := stream.timeline.gained(now_s, elapsed_ms)) is not None:
                # Most sequences of a step had a row in the step before too, so most of them have the same time.
                seconds /= len(tokens)
                intervals[seconds] = intervals.get(seconds, 0) + len(tokens)
            try:
                if stream.push(tokens):
                    self._scheduler.stop(seq)
                if seq.error is not None:
                    stream.fail(seq.error)
            except Exception as error:  # an error of one request must not fail the others
                text = "a request failed while its tokens were decoded to text\n%s"
                log.error(text, where(error), extra=of_request(seq.request_id))
                self._scheduler.finish(seq, FinishReason.ERROR)
                stream.fail(EngineError("the tokens of this request could not be decoded to text"))
            if seq.finished:
                self._retry.request_ended(now_s)
                self.drop(seq)
        return tuple(intervals.items())

    def _end(self, stream: TokenSink) -> None:
        stream.timeline.ended_s = time.monotonic()
        self._on_end(stream)
