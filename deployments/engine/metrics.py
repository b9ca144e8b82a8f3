"""The operators' metrics of one replica, each defined once and recorded for GET /metrics and in Ray's metrics (`metric.py`).

Six names are kept for operators of Meta's reference: tokens_generated_per_second, prefill_time_ms,
time_per_decoding_step_ms, gpu_memory_used_bytes, cuda_oom_errors_count, invalid_dialog_assertions_count. Counts end in
"_total", also the reference's two, whose own names are aliases. vLLM's names are in `model_metrics.py`.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import prometheus_client
import ray

from deployments.engine.interface import Engine
from deployments.engine.metric_set import MetricSet
from deployments.engine.model_metrics import ModelMetrics
from deployments.engine.sequence_stream import SequenceStream
from deployments.engine.step_stats import StepStats
from llama_core.errors import EngineError, LlamaError, NotReady, RankFailure

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
RATE_WINDOW_S = 10.0
REFRESH_S = 1.0
RECORD_AGAIN_S = 5.0  # unchanged values too: Ray drops a series that is not recorded for a while
PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/score", "/v1/classify", "handle"
)  # fmt: skip
TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
PREFILL_MS = tuple(1000 * s for s in TTFT_S)
STEP_MS = (0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 100.0, 200.0, 400.0, 1000.0, 5000.0)


class Metrics:
    """Every metric of one replica. Each instance has a registry of its own, so that tests and replicas share none."""

    def __init__(self, *, model_name: str = "llama", in_ray: bool | None = None) -> None:
        """in_ray: record in Ray's metrics too; if None, when this process is connected to a Ray that collects metrics."""
        metrics = MetricSet(in_ray=_is_collected_by_ray() if in_ray is None else in_ray)
        self._metrics = metrics
        self._recent: deque[tuple[float, int]] = deque()  # (when, tokens) within the rate's window
        self._recent_tokens = 0
        self._timed_ranks: set[int] = set()  # ranks with a value of rank_step_ms
        self._engine: Engine | None = None
        self._refreshing: asyncio.Task[None] | None = None

        self.tokens_generated_per_second = metrics.gauge(
            "tokens_generated_per_second", f"New tokens a second over the last {RATE_WINDOW_S:g} s"
        )
        self.prefill_time_ms = metrics.histogram("prefill_time_ms", "From a request to its first token", PREFILL_MS)
        self.time_to_first_token_seconds = metrics.histogram(
            "time_to_first_token_seconds", "The same as prefill_time_ms, in seconds", TTFT_S
        )
        self.time_per_decoding_step_ms = metrics.histogram(
            "time_per_decoding_step_ms", "A step that reads no prompt and gives sequences tokens", STEP_MS
        )
        self.gpu_memory_used_bytes = metrics.gauge("gpu_memory_used_bytes", "Device memory in use, by rank", ("rank",))
        self.num_requests_running = metrics.gauge("num_requests_running", "Sequences in the batch")
        self.num_requests_waiting = metrics.gauge("num_requests_waiting", "Sequences that wait for a slot")
        self.kv_cache_usage_perc = metrics.gauge("kv_cache_usage_perc", "Cache blocks in use, 0 to 1")
        self.cuda_oom_errors_total = metrics.renamed(
            "cuda_oom_errors_total", "Times a rank ran out of device memory", "cuda_oom_errors_count"
        )
        self.invalid_dialog_assertions_total = metrics.renamed(
            "invalid_dialog_assertions_total",
            "Refused dialogs: roles out of order, or the template's tags in a message",
            "invalid_dialog_assertions_count",
        )
        self.non_finite_logits_total = metrics.renamed(
            "non_finite_logits_total",
            "Requests for which the model computed NaN or infinity",
            "non_finite_logits_count",
        )
        self.rank_failures_total = metrics.renamed(
            "rank_failures_total", "Times the rank group failed", "rank_failures_count"
        )
        self.num_ranks = metrics.gauge(
            "num_ranks", "Ranks that serve; fewer than configured while there is no room for all"
        )
        self.rank_step_ms = metrics.gauge(
            "rank_step_ms", "A rank's own compute time in a step, without waiting for other ranks", ("rank",)
        )
        self.generated_tokens_total = metrics.renamed(
            "generated_tokens_total", "New tokens since the start", "generated_tokens_count"
        )
        self.prefix_cache_hit_tokens_total = metrics.renamed(
            "prefix_cache_hit_tokens_total",
            "Prompt tokens found in the prefix cache instead of computed",
            "prefix_cache_hit_tokens_count",
        )
        self.draft_tokens_total = metrics.renamed(
            "draft_tokens_total", "Draft tokens that were proposed and verified", "draft_tokens_count"
        )
        self.draft_tokens_accepted_total = metrics.renamed(
            "draft_tokens_accepted_total", "Draft tokens that were accepted", "draft_tokens_accepted_count"
        )
        self.deferred_samples_total = metrics.count(
            "deferred_samples_total", "Samples that a slow grammar left to a later step"
        )
        codes = sorted(set(_codes(LlamaError)))
        self.kept_streams_total = metrics.count("kept_streams_total", "Streams that were kept to be resumed")
        self.resumed_streams_total = metrics.count(
            "resumed_streams_total", "Requests that took up a kept stream, or had it again from its beginning"
        )
        self.dropped_streams_total = metrics.count(
            "dropped_streams_total",
            "Kept streams that were dropped, by cause: nobody read them any more, or memory was short",
            {"cause": ("expired", "memory")},
        )
        self.kept_stream_bytes = metrics.gauge("kept_stream_bytes", "Memory of the kept streams")
        self._kept_bytes: Callable[[], int] | None = None
        self.requests_total = metrics.count(
            "requests_total",
            "Finished requests, by route and outcome (ok, cancelled or an error's code)",
            {"path": PATHS, "outcome": ("ok", "cancelled", *codes)},
        )
        self.model = ModelMetrics(metrics, model_name, codes)

    def request_ended(
        self,
        path: str,
        outcome: str,
        total_s: float,
        ttft_s: float | None,
        num_tokens: int,
        error: LlamaError | None = None,
    ) -> None:
        """A request has ended with `outcome`: "ok", "cancelled" or the code of `error`."""
        self.requests_total.add(path=path, outcome=outcome)
        if outcome == "ok":
            self.model.e2e_request_latency.observe(total_s)
        elif error is not None and ttft_s is None and is_refusal(error):
            self.model.reject(error.code)

    def first_token(self, seconds: float) -> None:
        """A request's first token came `seconds` after the request."""
        self.prefill_time_ms.observe(1000 * seconds)
        self.time_to_first_token_seconds.observe(seconds)
        self.model.time_to_first_token.observe(seconds)

    def count_invalid_dialog(self) -> None:
        self.invalid_dialog_assertions_total.add()

    def on_failure(self, error: LlamaError) -> None:
        """The ranks have failed, or did not come up."""
        if isinstance(error, RankFailure):
            self.rank_failures_total.add()
        if "OutOfMemoryError" in error.message:
            self.cuda_oom_errors_total.add()

    def tokens_generated(self, num_tokens: int) -> None:
        """Count new tokens, in the total and in the rate."""
        self.generated_tokens_total.add(num_tokens)
        self._recent.append((time.monotonic(), num_tokens))
        self._recent_tokens += num_tokens

    def on_step(self, stats: StepStats) -> None:
        """One step of the engine has completed."""
        self.model.on_step(stats)
        self.tokens_generated(stats.num_sampled)
        if stats.is_decode:
            self.time_per_decoding_step_ms.observe(stats.elapsed_ms)
        if stats.num_prefix_hits:
            self.prefix_cache_hit_tokens_total.add(stats.num_prefix_hits)
        if stats.num_drafts:
            self.draft_tokens_total.add(stats.num_drafts)
            self.draft_tokens_accepted_total.add(stats.num_drafts_accepted)
        if stats.num_deferred:
            self.deferred_samples_total.add(stats.num_deferred)
        if stats.num_non_finite:
            self.non_finite_logits_total.add(stats.num_non_finite)
        if stats.device_memory_bytes:
            self.gpu_memory_used_bytes.set(stats.device_memory_bytes, rank="0")  # rank 0 sends the step's output

    def on_end(self, stream: SequenceStream) -> None:
        """A sequence has ended, for whatever reason."""
        seq = stream.sequence
        assert seq.finish_reason is not None
        self.model.on_end(seq.finish_reason, stream.timeline, seq.prompt_len, seq.length - seq.prompt_len)

    def on_compute_ms(self, compute_ms: Mapping[int, float]) -> None:
        """The milliseconds of a step that each rank computed without waiting, by rank."""
        for rank in self._timed_ranks - compute_ms.keys():  # the rank is gone, or had no step to compute
            self.rank_step_ms.set(0.0, rank=str(rank))
        for rank, milliseconds in compute_ms.items():
            self.rank_step_ms.set(milliseconds, rank=str(rank))
        self._timed_ranks |= compute_ms.keys()
        self.model.on_compute_ms(compute_ms)

    def watch(self, engine: Engine) -> None:
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
            for metric in self._metrics.all:
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
            self.kv_cache_usage_perc.set(state.blocks_used / state.blocks_total if state.blocks_total else 0.0)
            self.num_ranks.set(state.world_size)
            self.model.refresh(state)

    def render(self) -> bytes:
        """Prometheus text."""
        self.refresh()
        return self._metrics.render()


def is_refusal(error: LlamaError) -> bool:
    """Whether the server did not take the request, for a reason in the request or because it takes none now."""
    return isinstance(error, NotReady) or not isinstance(error, EngineError)


def _is_collected_by_ray() -> bool:
    is_off = os.environ.get("RAY_enable_metrics_collection", "1") in ("0", "false")  # noqa: SIM112 (Ray's own name)
    return ray.is_initialized() and not is_off


def _codes(error: type[LlamaError]) -> Iterator[str]:
    """The codes of an error and of all below it in the tree."""
    yield error.code
    for kind in error.__subclasses__():
        yield from _codes(kind)
