"""The streams of the sequences that have not ended: what a step has gained reaches their readers, and each ends once.

Knows nothing of the ranks, nor of when steps are made.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from deployments.engine.retry_after import RetryEstimate
from deployments.engine.step_report import Intervals
from deployments.engine.timeline import Timeline
from llama_core.errors import EngineError, LlamaError
from llama_core.scheduling.request import FinishReason, Sequence
from llama_core.scheduling.scheduler import Scheduler


class MeasuredStream(Protocol):
    """A stream as metrics see it."""

    sequence: Sequence
    timeline: Timeline


class TokenSink(MeasuredStream, Protocol):
    """What gets the tokens of one sequence for its front."""

    def admitted(self, now_s: float) -> None:
        """The sequence is in the batch, for the first time, by time.monotonic."""

    def push(self, tokens: list[int]) -> None:
        """The tokens that the sequence has gained; none when it ended without one."""

    def fail(self, error: LlamaError) -> None: ...


class LiveStreams:
    """The streams by their sequences. `idle` is set while there is no stream. output_tokens: of a stream, a moving mean."""

    def __init__(self, scheduler: Scheduler, retry: RetryEstimate, on_end: Callable[[MeasuredStream], None]) -> None:
        """on_end: for metrics, of ended sequences."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._scheduler = scheduler
        self._retry = retry
        self._on_end = on_end
        self._streams: dict[Sequence, TokenSink] = {}
        self.output_tokens = 0.0

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
            stream.push(tokens)
            if seq.error is not None:
                stream.fail(seq.error)
            if seq.finish_reason is not None:
                self._retry.request_ended(now_s)
                self.drop(seq)
        return tuple(intervals.items())

    def _end(self, stream: TokenSink) -> None:
        stream.timeline.ended_s = time.monotonic()
        seq = stream.sequence
        if seq.length > seq.prompt_len:
            self.output_tokens += (seq.length - seq.prompt_len - self.output_tokens) / (16 if self.output_tokens else 1)
        self._on_end(stream)
