"""The spans of one request, made at its end from the times that were kept while it ran.

The request's span has the attributes of OpenTelemetry's GenAI conventions. Below it are the spans of Meta's reference
(tokenize_encode, prefill_forward, decode_step_forward, sample_top_p, decode_decode), `queue` and `stream`. No span has text of
a prompt or of an answer. Knows nothing of HTTP, and nothing of how spans are exported.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.supervisor import Replacement
from deployments.engine.timeline import Timeline
from deployments.observe.span import Attributes, Event, Span, SpanSink, TraceContext, Value
from llama_core.scheduling.sampling_params import SamplingParams

MAX_TRACED_CHOICES: Final = 8  # of one request: each has five spans
CANCELLED: Final = "cancelled"  # the outcome of a request whose client left; no error


class RankFacts(NamedTuple):
    """ranks: attributes of an event for each rank. sample_ms: of a step, on rank 0; None if nobody measures it."""

    ranks: Sequence[Attributes] = ()
    sample_ms: float | None = None
    replacements: Sequence[Replacement] = ()


class RequestTrace:
    """One request that is traced. `end` is called once; every other method at most once, before it."""

    def __init__(
        self,
        name: str,
        context: TraceContext,
        sink: SpanSink,
        facts: Callable[[], RankFacts],
        attributes: Attributes,
    ) -> None:
        self.trace_id = context.trace_hex
        self._name, self._context, self._sink, self._facts = name, context, sink, facts
        self._attributes: dict[str, Value] = dict(attributes)
        self._began_s = time.monotonic()
        self._received_s: float | None = None
        self._encoded_s: float | None = None
        self._streaming_s: float | None = None
        self._streams: Sequence[SequenceStream] = ()
        self._timelines: list[Timeline] = []

    def received(self) -> None:
        """The body has arrived; it is parsed and tokenized next."""
        self._received_s = time.monotonic()

    def encoded(self, prompts: Sequence[Sequence[int]], attributes: Attributes) -> None:
        """The prompts are tokens. attributes: what the request asks for."""
        self._encoded_s = time.monotonic()
        self._attributes["gen_ai.usage.input_tokens"] = sum(map(len, prompts))
        self._attributes |= attributes

    def submitted(self, streams: Sequence[SequenceStream]) -> None:
        self._streams = streams
        self._timelines = [stream.timeline for stream in streams]  # a request that resumes them has others

    def streaming(self) -> None:
        """The first bytes of the stream are sent."""
        self._streaming_s = time.monotonic()

    def end(self, outcome: str, num_tokens: int, finish_reasons: Mapping[str, int], ttft_s: float | None) -> None:
        """outcome: "ok", "cancelled" or an error's code. finish_reasons: with the numbers of choices."""
        ended_s = time.monotonic()
        facts = self._facts()
        attributes = self._attributes
        attributes["gen_ai.usage.output_tokens"] = num_tokens
        reasons = [reason for reason, count in finish_reasons.items() for _ in range(count)]
        if reasons:
            attributes["gen_ai.response.finish_reasons"] = reasons
        if ttft_s is not None:
            attributes["gen_ai.response.time_to_first_chunk"] = ttft_s
        if cached := sum(stream.num_cached_tokens for stream in self._streams):
            attributes["gen_ai.usage.cache_read.input_tokens"] = cached
        if len(self._streams) > MAX_TRACED_CHOICES:
            attributes["llama.choices_without_spans"] = len(self._streams) - MAX_TRACED_CHOICES
        is_error = outcome not in ("ok", CANCELLED)
        if outcome != "ok":
            attributes["error.type"] = outcome
        root = Span(
            self._name,
            self._began_s,
            ended_s,
            attributes,
            list(self._events(facts, ended_s)),
            outcome if is_error else None,
        )
        self._sink.emit(self._context, root, list(self._stages(facts, ended_s, outcome if is_error else None)))

    def _events(self, facts: RankFacts, ended_s: float) -> Iterator[Event]:
        for replacement in facts.replacements:
            if replacement.resumed_s < self._began_s or replacement.failed_s > ended_s:
                continue
            failed = {} if replacement.rank is None else {"llama.rank": replacement.rank}
            yield Event("ranks_failed", replacement.failed_s, failed)
            yield Event("ranks_replaced", replacement.resumed_s, {"llama.epoch": replacement.epoch})
        if self._streams:
            for rank in facts.ranks:
                yield Event("rank", ended_s, rank)

    def _stages(self, facts: RankFacts, ended_s: float, error: str | None) -> Iterator[Span]:
        if self._received_s is not None:
            failed = error if self._encoded_s is None else None
            yield Span("tokenize_encode", self._received_s, self._encoded_s or ended_s, error=failed)
        for choice, timeline in enumerate(self._timelines[:MAX_TRACED_CHOICES]):
            number = {"llama.choice": choice} if len(self._streams) > 1 else {}
            yield from _choice_stages(timeline, number, facts.sample_ms, ended_s)
        if self._streaming_s is not None:
            yield Span("stream", self._streaming_s, ended_s, error=error)


def sampling_attributes(params: SamplingParams) -> dict[str, Value]:
    """Those that the conventions name, without the ones that change nothing."""
    attributes: dict[str, Value] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    for name in ("top_k", "presence_penalty", "frequency_penalty"):
        if value := getattr(params, name):
            attributes[f"gen_ai.request.{name}"] = value
    return attributes


def _choice_stages(times: Timeline, number: Attributes, sample_ms: float | None, ended_s: float) -> Iterator[Span]:
    """The spans of one choice. sample_top_p and decode_decode are sums over its steps; both begin at the first token."""
    ended_s = times.ended_s or ended_s
    yield Span("queue", times.submitted_s, times.admitted_s or ended_s, number)
    if times.admitted_s is None:
        return
    prefill = {**number, "llama.step_ms": times.prefill_ms}
    yield Span("prefill_forward", times.admitted_s, times.first_token_s or ended_s, prefill)
    first_s, last_s = times.first_token_s, times.last_token_s
    if first_s is None or last_s is None:
        return
    decode = {**number, "llama.steps": times.num_steps, "llama.steps_ms": times.forward_ms}
    yield Span("decode_step_forward", first_s, last_s, decode)
    sampled_s = 0.0 if sample_ms is None else sample_ms / 1e3 * (times.num_steps + 1)
    yield Span("sample_top_p", first_s, first_s + sampled_s, number)
    yield Span("decode_decode", first_s, first_s + times.detokenize_s, number)
