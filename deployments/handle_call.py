"""One call by Serve handle: the checks of its arguments, its metrics, its trace and its line in the request log."""

import asyncio
import json
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from deployments.engine.interface import Delta
from deployments.engine.metrics import Metrics
from deployments.engine.sequence_stream import SequenceStream
from deployments.http.field_types import MAX_BAD_WORD_CHARS, MAX_CHOICES
from deployments.http.request_log import MAX_LOGGED_CHARS
from deployments.tracing.request_trace import RequestTrace
from llama_core.errors import CallersDeadlineExceeded, DeadlineExceeded, InvalidParameter, LlamaError, RequestCancelled
from llama_core.log_lines import where
from llama_core.scheduling.request import FinishReason, TokenLogprob
from llama_core.scheduling.sampling_params import MAX_BAD_WORDS, whole_number

log = logging.getLogger("llama.requests")


class Call:
    """Begun with the call; `ended` once, with its outcome."""

    def __init__(self, metrics: Metrics, method: str, request_id: str, trace: RequestTrace | None = None) -> None:
        self._metrics = metrics
        self._trace = trace
        self._request_id = request_id
        self._fields: dict[str, object] = {"request_id": request_id, "path": "handle", "method": method}
        self._began = time.monotonic()
        self._ttft_s: float | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.streams: list[SequenceStream] = []
        self.decode: Callable[[Sequence[int]], str] | None = None  # where prompts are logged

    def asks(self, prompts: Sequence[Sequence[int]], max_gen_len: int, temperature: float, top_p: float) -> None:
        longest = max((len(prompt) for prompt in prompts), default=0)
        self._fields |= {"batch_size": len(prompts), "prompt_length": longest, "max_gen_len": max_gen_len}
        self._fields |= {"temperature": temperature, "top_p": top_p}
        if self.decode is not None:
            self._fields["prompts"] = [self.decode(list(prompt))[:MAX_LOGGED_CHARS] for prompt in prompts]
        if self._trace is not None:
            asked = {"max_tokens": max_gen_len, "temperature": temperature, "top_p": top_p}
            self._trace.encoded(prompts, {f"gen_ai.request.{name}": value for name, value in asked.items()})

    @property
    def is_traced(self) -> bool:
        return self._trace is not None

    def on_delta(self) -> None:
        if self._ttft_s is None:
            self._ttft_s = time.monotonic() - self._began
            self._metrics.prefill_time_ms.observe(1000 * self._ttft_s)

    def ends_within(self, limit_s: float | None) -> None:
        """The streams, all of which have been submitted, end with DeadlineExceeded so long after the call began.

        limit_s: seconds, as `checked_limit` returns them.
        """
        if limit_s is None:
            return
        error = CallersDeadlineExceeded(f"The answer was not complete within {limit_s:g} s, the limit of this call.")
        left_s = self._began + limit_s - time.monotonic()
        self._deadline = asyncio.get_running_loop().call_later(max(left_s, 0.0), self._end_streams, error)

    def cancel(self) -> None:
        """Cancel the sequences that have not ended: nobody reads them any more."""
        for stream in self.streams:
            stream.cancel()

    def _end_streams(self, error: DeadlineExceeded) -> None:
        for stream in self.streams:
            stream.end(error)

    def ended(self, outcome: str, level: int, error: LlamaError | None = None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        total_s = time.monotonic() - self._began
        num_tokens = sum(len(stream.sequence.output) for stream in self.streams)
        self._metrics.request_ended("handle", outcome, total_s, self._ttft_s, num_tokens, error)
        fields = {"outcome": outcome} | self._fields
        if error is not None:
            fields["error"] = error.message
        reasons = Counter(stream.finish_reason.value for stream in self.streams if stream.finish_reason is not None)
        if self.streams:
            fields["generated"] = num_tokens
            fields["finish_reasons"] = dict(reasons)
        if self._trace is not None:
            self._trace.submitted(self.streams)
            self._trace.end(outcome, num_tokens, reasons, self._ttft_s)
        if self._ttft_s is not None:
            fields["ttft_ms"] = round(1000 * self._ttft_s, 1)
        fields["total_ms"] = round(1000 * total_s, 1)
        if self._trace is not None:
            fields["trace_id"] = self._trace.trace_id
        extra = {"log_to_stderr": level > logging.INFO, "event": "request", "fields": fields}
        extra |= {"request_id": self._request_id, "skip_context_filter": True}
        log.log(level, "request %s", json.dumps(fields, default=repr), extra=extra)


def checked_limit(timeout_s: object) -> float | None:
    """The time limit of a call in seconds; None for none. Raises InvalidParameter unless it is positive and finite."""
    if timeout_s is None:
        return None
    try:
        limit_s = math.nan if isinstance(timeout_s, bool | str | bytes) else float(timeout_s)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        raise InvalidParameter("timeout_s must be a finite number of seconds greater than 0", param="timeout_s")
    return limit_s


def checked_n(n: object, num_prompts: int, most: int) -> int:
    """`n`, the continuations of each prompt, as an int. most: sequences that an idle server can take at once.

    Raises InvalidParameter unless `n` is within the bounds of HTTP's field, and the server could take all sequences.
    """
    count = whole_number("n", n)
    if not 1 <= count <= MAX_CHOICES:
        raise InvalidParameter(f"n must be from 1 to {MAX_CHOICES}", param="n")
    if num_prompts * count > most:
        raise InvalidParameter(f"n: prompts * n must be at most {most} (max_batch_size + max_queue)", param="n")
    return count


def checked_bad_words(words: object) -> Sequence[str]:
    """`words`, which may be None for none. Raises InvalidParameter unless they are within the limits of HTTP's field."""
    most = MAX_BAD_WORDS // 3  # each in up to three spellings
    if words is None:
        return ()
    if not isinstance(words, list | tuple) or len(words) > most:
        raise InvalidParameter(f"bad_words must be a list of at most {most} strings", param="bad_words")
    if not all(isinstance(word, str) and 1 <= len(word) <= MAX_BAD_WORD_CHARS for word in words):
        raise InvalidParameter(
            f"bad_words: each must be a string of 1 to {MAX_BAD_WORD_CHARS} characters", param="bad_words"
        )
    return words


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


async def until_aborted(stream: SequenceStream) -> AsyncIterator[Delta]:
    """The stream's deltas; the last has the finish reason "abort" if the sequence was aborted."""
    try:
        async for delta in stream:
            yield delta
    except RequestCancelled:
        yield Delta("", [], [], FinishReason.ABORT)


def prompt_logprobs_of(stream: SequenceStream) -> list[TokenLogprob]:
    """Those of prompt positions 1, 2, ... that the request asked for; known with the first delta."""
    return list(stream.prompt_logprobs) if stream.sequence.params.prompt_logprobs else []


async def read_to_end(stream: SequenceStream, call: Call) -> None:
    async for _ in stream:
        call.on_delta()
