"""The request log: one line of JSON for each HTTP request and each call by handle, and its metrics.

The JSON is ASCII with control characters escaped, so nothing that a client sends can start a log line of its own.
"""

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence

from deployments.engine.interface import Delta, TokenStream
from deployments.observe.metrics import Metrics
from deployments.observe.request_trace import RequestTrace, sampling_attributes
from deployments.observe.span import Value
from deployments.openai.errors import log_level
from deployments.openai.plan import Plan
from llama_core.errors import InvalidDialog, LlamaError, RequestCancelled
from llama_core.scheduling.request import FinishReason

log = logging.getLogger("llama.requests")
OWNER_DIGITS = 12  # of a SHA-256: distinguishes users without naming them
MAX_LOGGED_CHARS = 16_384  # of a prompt, where prompts are logged


class RequestRecord:
    """Follows one request from its arrival to its only outcome."""

    def __init__(
        self,
        metrics: Metrics,
        path: str,
        request_id: str,
        owner: str = "",
        trace: RequestTrace | None = None,
        method: str = "",
    ) -> None:
        """owner: that of the request's key, where keys are configured; otherwise the plan's `user` is logged as a digest.
        method: of a call by handle."""
        self._metrics = metrics
        self._path = path
        self.request_id = request_id
        self._owner = owner
        self._method = method
        self._started_s = time.monotonic()
        self._ttft_s: float | None = None
        self._plan: Plan | None = None
        self._num_tokens = 0
        self._finish_reasons: Counter[str] = Counter()
        self._ended = False
        self._trace = trace
        self._prompts: list[str] | None = None

    @property
    def is_traced(self) -> bool:
        return self._trace is not None

    def prompts_are(self, texts: Sequence[str]) -> None:
        """To be logged, up to `MAX_LOGGED_CHARS` of each."""
        self._prompts = [text[:MAX_LOGGED_CHARS] for text in texts]

    def received(self) -> None:
        """The body has arrived."""
        if self._trace is not None:
            self._trace.received()

    def planned(self, plan: Plan) -> None:
        self._plan = plan
        if self._trace is not None:
            asked: dict[str, Value] = {"gen_ai.request.stream": plan.stream}
            if plan.request.n > 1:
                asked["gen_ai.request.choice.count"] = plan.request.n
            self._trace.encoded(plan.request.prompts, sampling_attributes(plan.request.params[0]) | asked)
        if plan.request.terms.owner and not self._owner:
            self._owner = hashlib.sha256(plan.request.terms.owner.encode(errors="replace")).hexdigest()[:OWNER_DIGITS]

    def submitted(self, streams: Sequence[TokenStream]) -> None:
        if self._trace is not None:
            self._trace.submitted(streams)

    def streaming(self) -> None:
        """The first bytes of a stream are sent."""
        if self._trace is not None:
            self._trace.streaming()

    def delta(self, delta: Delta) -> None:
        """Counts a delta of one choice. The first delta with a token sets the time to first token."""
        if self._ttft_s is None and delta.tokens:
            self._ttft_s = time.monotonic() - self._started_s
            self._metrics.prefill_time_ms.observe(1000 * self._ttft_s)
        self._num_tokens += len(delta.tokens)
        if delta.finish_reason is not None:
            self._finish_reasons[delta.finish_reason] += 1

    def succeeded(self) -> None:
        self._end("ok", logging.INFO)

    def failed(self, error: BaseException) -> None:
        """The outcome is the error's code; "cancelled" for a task that was cancelled, because its client disconnected."""
        if isinstance(error, InvalidDialog):
            self._metrics.invalid_dialogs.add()
        if isinstance(error, RequestCancelled) or not isinstance(error, Exception):
            self._end("cancelled", logging.INFO)
        elif isinstance(error, LlamaError):
            self._end(error.code, log_level(error), error)
        else:
            self._end(LlamaError.code, logging.ERROR)

    def closed(self) -> None:
        """End the request. Without another outcome, its client has disconnected."""
        self._end("cancelled", logging.INFO)

    def _end(self, outcome: str, level: int, error: LlamaError | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        total_s = time.monotonic() - self._started_s
        self._metrics.request_ended(self._path, outcome, total_s, self._ttft_s, error)
        if self._trace is not None:
            self._trace.end(outcome, self._num_tokens, self._finish_reasons, self._ttft_s)
        fields: dict[str, object] = {"request_id": self.request_id, "path": self._path, "outcome": outcome}
        if self._owner:
            fields["owner"] = self._owner
        if self._method:
            fields["method"] = self._method
            if error is not None:
                fields["error"] = error.message
        if (plan := self._plan) is not None:
            fields |= {
                "batch_size": len(plan.request.prompts),
                "n": plan.request.n,
                "prompt_length": max(len(prompt) for prompt in plan.request.prompts),
                "max_gen_len": max(params.max_tokens for params in plan.request.params),
                "temperature": plan.request.params[0].temperature,
                "top_p": plan.request.params[0].top_p,
                "stream": plan.stream,
                "generated": self._num_tokens,
                "finish_reasons": dict(self._finish_reasons),
            }
        if self._trace is not None:
            fields["trace_id"] = self._trace.trace_id
        if self._prompts is not None:
            fields["prompts"] = self._prompts
        if self._ttft_s is not None:
            fields["ttft_ms"] = round(1000 * self._ttft_s, 1)
        fields["total_ms"] = round(1000 * total_s, 1)
        if num_at_limit := self._finish_reasons[FinishReason.LENGTH]:
            fields["without_eos"] = num_at_limit
        # For Serve's log handlers: only warnings and errors go to standard error, which Ray shows on a terminal; and the
        # context of the request that runs when the batch is written is not this request's.
        extra = {
            "log_to_stderr": level > logging.INFO,
            "skip_context_filter": True,
            "event": "request",
            "fields": fields,
            "request_id": self.request_id,
        }
        log.log(level, "request %s", json.dumps(fields), extra=extra)
