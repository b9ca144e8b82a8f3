"""The metrics of one replica, each defined once and recorded for GET /metrics and in Ray's metrics (`metric.py`).

Six names are those of Meta's reference: tokens_generated_per_second, prefill_time_ms, time_per_decoding_step_ms,
gpu_memory_used_bytes, cuda_oom_errors_count, invalid_dialog_assertions_count. All others begin with `llama_` and have the label
`model_name`; where vLLM has the same metric, its name follows, so that dashboards and alerts for vLLM need another prefix only.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

import prometheus_client
import ray

from deployments.engine.interface import FLEET_EVENTS, EngineState
from deployments.engine.live_streams import MeasuredStream
from deployments.engine.step_report import StepStats
from deployments.engine.timeline import Timeline
from deployments.observe.metric import MetricSet
from llama_core.errors import EngineError, LlamaError, NotReady, QueueFull, RankFailure
from llama_core.scheduling.request import FinishReason

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
RATE_WINDOW_S = 10.0
REFRESH_S = 1.0
RECORD_AGAIN_S = 5.0  # unchanged values too: Ray drops a series that is not recorded for a while
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/score", "/v1/classify",
    "handle",
)  # fmt: skip
PREFILL_MS: Final = (
    5.0, 10.0, 20.0, 40.0, 80.0, 150.0, 300.0, 600.0, 1200.0, 2500.0, 5000.0, 10_000.0, 20_000.0, 40_000.0, 80_000.0
)  # fmt: skip
STEP_MS: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 100.0, 200.0, 400.0, 1000.0, 5000.0)
# vLLM's bounds, with smaller ones for small models.
TTFT_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
    2560.0,
)  # fmt: skip
TOKEN_S: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0,
)  # fmt: skip
REQUEST_S: Final = (
    0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS: Final = tuple(float(part * 10**power) for power in range(6) for part in (1, 2, 5))


class Described(Protocol):
    def describe(self) -> EngineState: ...


class Metrics:
    """Every metric of one replica. Each instance has a registry of its own, so that tests and replicas share none."""

    def __init__(self, *, model_name: str = "llama", in_ray: bool | None = None) -> None:
        """in_ray: record in Ray's metrics too; if None, when this process is connected to a Ray that collects metrics."""
        is_in_ray = _is_collected_by_ray() if in_ray is None else in_ray
        self.registry = prometheus_client.CollectorRegistry()
        reference = MetricSet(self.registry, "", {}, in_ray=is_in_ray)
        named = MetricSet(self.registry, "llama_", {"model_name": model_name}, in_ray=is_in_ray)
        self._recent: deque[tuple[float, int]] = deque()  # (when, tokens) within the rate's window
        self._recent_tokens = 0
        self._timed_ranks: set[int] = set()  # ranks with a value of rank_step_seconds
        self._engine: Described | None = None
        self._kept_bytes: Callable[[], int] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._define_the_references(reference)
        self._define_counts(named)
        self._define_gauges_and_times(named)
        self._all = [*reference.all, *named.all]

    def _define_the_references(self, metrics: MetricSet) -> None:
        gauge, count, histogram = metrics.gauge, metrics.count, metrics.histogram
        self.tokens_generated_per_second = gauge(
            "tokens_generated_per_second", f"New tokens a second over the last {RATE_WINDOW_S:g} s"
        )
        self.prefill_time_ms = histogram("prefill_time_ms", "From a request to its first token", PREFILL_MS)
        self.time_per_decoding_step_ms = histogram(
            "time_per_decoding_step_ms", "A step that reads no prompt and gives sequences tokens", STEP_MS
        )
        self.gpu_memory_used_bytes = gauge("gpu_memory_used_bytes", "Device memory in use, by rank", "rank")
        self.cuda_oom_errors = count("cuda_oom_errors_count", "Times a rank ran out of device memory")
        self.invalid_dialogs = count(
            "invalid_dialog_assertions_count",
            "Refused dialogs: roles out of order, or the template's tags in a message",
        )

    def _define_counts(self, metrics: MetricSet) -> None:
        count = metrics.count
        codes = sorted(set(_codes(LlamaError)))
        self.requests = count(
            "requests_total",
            "Finished requests, by route and outcome (ok, cancelled or an error's code)",
            {"path": PATHS, "outcome": ("ok", "cancelled", *codes)},
        )
        self.requests_rejected = count(
            "requests_rejected_total", "Requests that were refused, by the error's code", {"cause": codes}
        )
        self.request_success = count(
            "request_success_total",
            "Ended sequences, by reason",
            {"finished_reason": tuple(reason.value for reason in FinishReason)},
        )
        self.prompt_tokens = count("prompt_tokens_total", "Prompt tokens of admitted sequences")
        self.generation_tokens = count("generation_tokens_total", "New tokens")
        self.prefix_cache_queries = count(
            "prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix cache"
        )
        self.prefix_cache_hits = count(
            "prefix_cache_hits_total", "Prompt tokens found in the prefix cache instead of computed"
        )
        self.draft_tokens = count("spec_decode_num_draft_tokens_total", "Draft tokens that were proposed and verified")
        self.accepted_tokens = count("spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted")
        self.deferred_samples = count("deferred_samples_total", "Samples that a slow grammar left to a later step")
        self.non_finite_logits = count(
            "non_finite_logits_total", "Requests for which the model computed NaN or infinity"
        )
        self.num_preemptions = count("num_preemptions_total", "Sequences that lost their blocks and waited again")
        self.fleet_events = count(
            "fleet_events_total",
            "Of a front: streams that changed engines (moved) or had none (held), held streams that ended so "
            "(hold_timeout), and engines that fell silent (suspected)",
            {"event": FLEET_EVENTS},
        )
        self.rank_failures = count("rank_failures_total", "Times the rank group failed")
        self.rank_restarts = count("rank_restarts_total", "Starts of new ranks after the first")
        self.kept_streams = count("kept_streams_total", "Streams that were kept to be resumed")
        self.resumed_streams = count(
            "resumed_streams_total",
            "Streams that a client came back to, by source: tokens that were kept here, or computed again",
            {"source": ("kept", "computed")},
        )
        self.dropped_streams = count(
            "dropped_streams_total",
            "Kept streams that were dropped, by cause: nobody read them any more, or memory was short",
            {"cause": ("expired", "memory")},
        )

    def _define_gauges_and_times(self, metrics: MetricSet) -> None:
        gauge, histogram = metrics.gauge, metrics.histogram
        self.num_requests_running = gauge("num_requests_running", "Sequences in the batch")
        self.num_requests_waiting = gauge("num_requests_waiting", "Sequences that wait for a slot")
        self.kv_cache_usage = gauge("kv_cache_usage_perc", "Cache blocks in use, 0 to 1")
        self.kept_stream_bytes = gauge("kept_stream_bytes", "Memory of the kept streams")
        self.num_ranks = gauge("num_ranks", "Ranks that serve; fewer than configured while there is no room for all")
        self.engine_requests_running = gauge(
            "engine_requests_running", "Sequences in an engine's batch; absent once it has left", "engine"
        )
        self.engine_requests_waiting = gauge(
            "engine_requests_waiting", "Sequences that wait for an engine's slot", "engine"
        )
        self.engine_refusals = gauge("engine_refusals", "Requests of a front that an engine refused", "engine")
        self.engine_silent_seconds = gauge(
            "engine_silent_seconds", "Since a front heard an engine, which says something twice a second", "engine"
        )
        self.rank_step_seconds = gauge(
            "rank_step_seconds", "A rank's own compute time in a step, without waiting for other ranks", "rank"
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a sequence's submission to its first token", TTFT_S
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds",
            "Between two tokens of a sequence; tokens of one step share the time",
            TOKEN_S,
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "A sequence's mean time for a token after the first", TOKEN_S
        )
        self.e2e_request_latency = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to the end of its answer", REQUEST_S
        )
        self.request_queue_time = histogram(
            "request_queue_time_seconds", "From a sequence's submission to its admission to the batch", REQUEST_S
        )
        self.request_prefill_time = histogram(
            "request_prefill_time_seconds", "From a sequence's admission to its first token", REQUEST_S
        )
        self.request_decode_time = histogram(
            "request_decode_time_seconds", "From a sequence's first token to its last", REQUEST_S
        )
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a sequence", TOKENS)
        self.request_generation_tokens = histogram("request_generation_tokens", "New tokens of a sequence", TOKENS)

    def request_ended(
        self,
        path: str,
        outcome: str,
        total_s: float,
        ttft_s: float | None,
        error: LlamaError | None = None,
    ) -> None:
        """A request has ended with `outcome`: "ok", "cancelled" or the code of `error`."""
        self.requests.add(path=path, outcome=outcome)
        if outcome == "ok":
            self.e2e_request_latency.observe(total_s)
        elif error is not None and ttft_s is None and is_refusal(error):
            self.requests_rejected.add(cause=error.code)

    def on_failure(self, error: LlamaError) -> None:
        """The ranks have failed, or did not come up."""
        if isinstance(error, RankFailure):
            self.rank_failures.add()
        if "OutOfMemoryError" in error.message:
            self.cuda_oom_errors.add()

    def on_step(self, stats: StepStats) -> None:
        """One step of the engine has completed."""
        self.generation_tokens.add(stats.num_sampled)
        self._recent.append((time.monotonic(), stats.num_sampled))
        self._recent_tokens += stats.num_sampled
        if stats.is_decode:
            self.time_per_decoding_step_ms.observe(stats.elapsed_ms)
        if stats.num_prompt_tokens:
            self.prompt_tokens.add(stats.num_prompt_tokens)
            self.prefix_cache_queries.add(stats.num_prompt_tokens)
            self.prefix_cache_hits.add(stats.num_prompt_hits)
        if stats.num_drafts:
            self.draft_tokens.add(stats.num_drafts)
            self.accepted_tokens.add(stats.num_drafts_accepted)
        if stats.num_deferred:
            self.deferred_samples.add(stats.num_deferred)
        if stats.num_non_finite:
            self.non_finite_logits.add(stats.num_non_finite)
        if stats.device_memory_bytes:
            self.gpu_memory_used_bytes.set(stats.device_memory_bytes, rank="0")  # rank 0 sends the step's output
        for seconds, num_tokens in stats.token_intervals:
            self.inter_token_latency.observe(seconds, num_tokens)

    def on_end(self, stream: MeasuredStream) -> None:
        """A sequence has ended, for whatever reason."""
        seq = stream.sequence
        assert seq.finish_reason is not None
        self.sequence_ended(seq.finish_reason, stream.timeline, seq.prompt_len, seq.length - seq.prompt_len)

    def sequence_ended(self, reason: FinishReason, timeline: Timeline, num_prompt: int, num_generated: int) -> None:
        """A sequence has ended, of so many tokens. A stage that it did not reach is not counted."""
        self.request_success.add(finished_reason=reason.value)
        self.request_prompt_tokens.observe(num_prompt)
        self.request_generation_tokens.observe(num_generated)
        for histogram, seconds in (
            (self.request_queue_time, timeline.queue_s),
            (self.request_prefill_time, timeline.prefill_s),
            (self.time_to_first_token, timeline.first_token_after_s),
            (self.request_decode_time, timeline.decode_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if timeline.decode_s is not None and num_generated > 1:
            self.time_per_output_token.observe(timeline.decode_s / (num_generated - 1))

    def on_compute_ms(self, compute_ms: Mapping[int, float]) -> None:
        """The milliseconds of a step that each rank computed without waiting, by rank. A rank that is gone has 0."""
        self._timed_ranks |= compute_ms.keys()
        for rank in self._timed_ranks:
            self.rank_step_seconds.set(compute_ms.get(rank, 0.0) / 1e3, rank=str(rank))

    def watch(self, engine: Described) -> None:
        """Read queue lengths and cache use from `engine` before every rendering and, where a loop runs, every second."""
        self._engine = engine
        try:
            self._refreshing = asyncio.get_running_loop().create_task(self._keep_fresh())
        except RuntimeError:
            return

    def watch_kept_streams(self, num_bytes: Callable[[], int]) -> None:
        """Read the memory of the kept streams before every rendering."""
        self._kept_bytes = num_bytes

    async def _keep_fresh(self) -> None:
        recorded_s = 0.0
        while True:
            await asyncio.sleep(REFRESH_S)
            self.refresh()
            again = time.monotonic() - recorded_s >= RECORD_AGAIN_S
            if again:
                recorded_s = time.monotonic()
            for metric in self._all:
                while not metric.publish(again=again):  # noqa: ASYNC110 (nothing is waited for)
                    await asyncio.sleep(0)  # streams continue between two batches
                await asyncio.sleep(0)

    def refresh(self) -> None:
        """Update what changes without an event: the rate while nothing is generated, and the engine's state."""
        oldest = time.monotonic() - RATE_WINDOW_S
        while self._recent and self._recent[0][0] < oldest:
            self._recent_tokens -= self._recent.popleft()[1]
        self.tokens_generated_per_second.set(self._recent_tokens / RATE_WINDOW_S)
        if self._kept_bytes is not None:
            self.kept_stream_bytes.set(self._kept_bytes())
        if self._engine is not None:
            state = self._engine.describe()
            self.num_requests_running.set(state.requests_running)
            self.num_requests_waiting.set(state.requests_waiting)
            self.kv_cache_usage.set(state.blocks_used / state.blocks_total if state.blocks_total else 0.0)
            self.num_ranks.set(state.world_size)
            engines = {engine.id: engine for engine in state.engines}
            for gauge, values in (
                (self.engine_requests_running, {name: each.requests_running for name, each in engines.items()}),
                (self.engine_requests_waiting, {name: each.requests_waiting for name, each in engines.items()}),
                (self.engine_refusals, {name: each.refusals for name, each in engines.items()}),
                (self.engine_silent_seconds, {name: each.silent_s for name, each in engines.items()}),
            ):
                gauge.retain("engine", engines)
                for name, value in values.items():
                    gauge.set(value, engine=name)
            for event, count in state.fleet_events.items():
                self.fleet_events.set(count, event=event)
            self.num_preemptions.rise_to(state.preemptions)
            self.rank_restarts.rise_to(state.epoch)

    def render(self) -> bytes:
        """Prometheus text of what has been recorded."""
        self.refresh()
        return prometheus_client.generate_latest(self.registry)


def is_refusal(error: LlamaError) -> bool:
    """Whether the server did not take the request, for a reason in the request or because it takes none now."""
    return isinstance(error, NotReady | QueueFull) or not isinstance(error, EngineError)


def _is_collected_by_ray() -> bool:
    is_off = os.environ.get("RAY_enable_metrics_collection", "1") in ("0", "false")  # noqa: SIM112 (Ray's own name)
    return ray.is_initialized() and not is_off


def _codes(error: type[LlamaError]) -> Iterator[str]:
    """The codes of an error and of all below it in the tree."""
    yield error.code
    for kind in error.__subclasses__():
        yield from _codes(kind)
