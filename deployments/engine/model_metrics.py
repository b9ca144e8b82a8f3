"""Metrics of a served model under vLLM's names, with the prefix `llama_` for `vllm:` and the label `model_name`.

Dashboards and alerts written for vLLM need another prefix only. Times of requests are measured for each sequence, as vLLM does,
except those to the first token and to the end, which begin when the request arrives.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from deployments.engine.bucket_histogram import BucketHistogram
from deployments.engine.interface import EngineState
from deployments.engine.metric import Count, Gauge
from deployments.engine.metric_set import MetricSet
from deployments.engine.step_stats import StepStats
from deployments.engine.timeline import Timeline
from llama_core.scheduling.request import FinishReason

PREFIX: Final = "llama_"
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


class ModelMetrics:
    """One model's metrics of one replica. causes: codes of errors with which requests are refused."""

    def __init__(self, metrics: MetricSet, model_name: str, causes: Iterable[str]) -> None:
        self._metrics = metrics
        self._labels = {"model_name": model_name}
        self._timed_ranks: set[int] = set()
        self.num_requests_running = self._gauge("num_requests_running", "Sequences in the batch")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Sequences that wait for a slot")
        self.kv_cache_usage_perc = self._gauge("kv_cache_usage_perc", "Cache blocks in use, 0 to 1")
        self.num_ranks = self._gauge("num_ranks", "Ranks that serve")
        self.rank_step_seconds = self._gauge(
            "rank_step_seconds", "A rank's own compute time in a step, without waiting for other ranks", "rank"
        )
        self.prompt_tokens = self._count("prompt_tokens_total", "Prompt tokens of admitted sequences")
        self.generation_tokens = self._count("generation_tokens_total", "New tokens")
        self.prefix_cache_queries = self._count(
            "prefix_cache_queries_total", "Prompt tokens that were looked up in the prefix cache"
        )
        self.prefix_cache_hits = self._count("prefix_cache_hits_total", "Prompt tokens found in the prefix cache")
        self.num_preemptions = self._count("num_preemptions_total", "Sequences that lost their blocks and waited again")
        self.rank_restarts = self._count("rank_restarts_total", "Starts of new ranks after the first")
        self.request_success = self._count(
            "request_success_total",
            "Ended sequences, by reason",
            {"finished_reason": tuple(reason.value for reason in FinishReason)},
        )
        self.requests_rejected = self._count(
            "requests_rejected_total", "Requests that were refused, by the error's code", {"cause": tuple(causes)}
        )
        self.time_to_first_token = self._times(
            "time_to_first_token_seconds", "From a request's arrival to its first token", TTFT_S
        )
        self.inter_token_latency = self._times(
            "inter_token_latency_seconds",
            "Between two tokens of a sequence; tokens of one step share the time",
            TOKEN_S,
        )
        self.time_per_output_token = self._times(
            "request_time_per_output_token_seconds", "A sequence's mean time for a token after the first", TOKEN_S
        )
        self.e2e_request_latency = self._times(
            "e2e_request_latency_seconds", "From a request's arrival to the end of its answer", REQUEST_S
        )
        self.request_queue_time = self._times(
            "request_queue_time_seconds", "From a sequence's submission to its admission to the batch", REQUEST_S
        )
        self.request_prefill_time = self._times(
            "request_prefill_time_seconds", "From a sequence's admission to its first token", REQUEST_S
        )
        self.request_prompt_tokens = self._times("request_prompt_tokens", "Prompt tokens of a sequence", TOKENS)
        self.request_generation_tokens = self._times("request_generation_tokens", "New tokens of a sequence", TOKENS)
        self.request_decode_time = self._times(
            "request_decode_time_seconds", "From a sequence's first token to its last", REQUEST_S
        )

    def on_step(self, stats: StepStats) -> None:
        """One step of the engine has completed."""
        labels = self._labels
        self.generation_tokens.add(stats.num_sampled, **labels)
        if stats.num_prompt_tokens:
            self.prompt_tokens.add(stats.num_prompt_tokens, **labels)
            self.prefix_cache_queries.add(stats.num_prompt_tokens, **labels)
            self.prefix_cache_hits.add(stats.num_prompt_hits, **labels)
        for seconds, num_tokens in stats.token_intervals:
            self.inter_token_latency.observe(seconds, num_tokens)

    def on_end(self, reason: FinishReason, timeline: Timeline, num_prompt: int, num_generated: int) -> None:
        """A sequence has ended, of so many tokens. A stage that it did not reach is not counted."""
        self.request_success.add(1, **self._labels, finished_reason=reason.value)
        self.request_prompt_tokens.observe(num_prompt)
        self.request_generation_tokens.observe(num_generated)
        for histogram, seconds in (
            (self.request_queue_time, timeline.queue_s),
            (self.request_prefill_time, timeline.prefill_s),
            (self.request_decode_time, timeline.decode_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if timeline.decode_s is not None and num_generated > 1:
            self.time_per_output_token.observe(timeline.decode_s / (num_generated - 1))

    def on_compute_ms(self, compute_ms: Mapping[int, float]) -> None:
        """The milliseconds of a step that each rank computed without waiting, by rank; 0 for a rank that is gone."""
        self._timed_ranks |= compute_ms.keys()
        for rank in self._timed_ranks:
            self.rank_step_seconds.set(compute_ms.get(rank, 0.0) / 1e3, **self._labels, rank=str(rank))

    def reject(self, cause: str) -> None:
        """A request was refused with an error of this code."""
        self.requests_rejected.add(1, **self._labels, cause=cause)

    def refresh(self, state: EngineState) -> None:
        """Copy the engine's gauges and totals."""
        labels = self._labels
        self.num_requests_running.set(state.requests_running, **labels)
        self.num_requests_waiting.set(state.requests_waiting, **labels)
        self.kv_cache_usage_perc.set(state.blocks_used / state.blocks_total if state.blocks_total else 0.0, **labels)
        self.num_ranks.set(state.world_size, **labels)
        self.num_preemptions.rise_to(state.preemptions, **labels)
        self.rank_restarts.rise_to(state.epoch, **labels)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return self._metrics.gauge(PREFIX + name, help_text, (*self._labels, *labels))

    def _count(self, name: str, help_text: str, known: Mapping[str, tuple[str, ...]] | None = None) -> Count:
        constant = {label: (value,) for label, value in self._labels.items()}
        return self._metrics.count(PREFIX + name, help_text, constant | dict(known or {}))

    def _times(self, name: str, help_text: str, bounds: tuple[float, ...]) -> BucketHistogram:
        return self._metrics.bucket_histogram(PREFIX + name, help_text, bounds, self._labels)
