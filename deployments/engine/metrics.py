"""The operators' figures, each defined once and recorded twice: for GET /metrics of this replica, and in Ray's metrics.

Names are those that operators of the reference watch, and the suffixes that Ray's own dashboards for LLMs ask for. A
"count" only ever grows but keeps its plain name (a Prometheus counter would be renamed to `..._total`).
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Literal

import prometheus_client
import ray
from ray.serve import metrics as ray_metrics

from deployments.engine.engine_loop import StepStats
from deployments.engine.interface import Engine
from llama_core.errors import LlamaError, RankFailure

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
RATE_WINDOW_S = 10.0
REFRESH_S = 1.0
MOST_AT_ONCE = 64  # values of a histogram; Ray takes 10 us for one, and streams must go on meanwhile
MOST_KEPT = 100_000
TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
PREFILL_MS = tuple(1000 * s for s in TTFT_S)
STEP_MS = (0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 100.0, 200.0, 400.0, 1000.0, 5000.0)

Kind = Literal["gauge", "count", "histogram"]


class Figure:
    """One metric and both places where it is recorded. Not safe across threads: a replica has one event loop.

    Recording costs next to nothing, as befits what every step does; `publish` does the rest, once a second.
    """

    def __init__(
        self,
        registry: prometheus_client.CollectorRegistry,
        kind: Kind,
        name: str,
        help_text: str,
        labels: tuple[str, ...] = (),
        *,
        buckets: tuple[float, ...] = (),
        in_ray: bool = False,
    ) -> None:
        self._kind = kind
        self._values: dict[tuple[tuple[str, str], ...], float] = {}  # by labels
        self._published: dict[tuple[tuple[str, str], ...], float] = {}
        self._observed: deque[float] = deque(maxlen=MOST_KEPT)  # not published yet
        self._local: prometheus_client.Gauge | prometheus_client.Histogram
        if kind == "histogram":
            self._local = prometheus_client.Histogram(name, help_text, labels, registry=registry, buckets=buckets)
        else:
            self._local = prometheus_client.Gauge(name, help_text, labels, registry=registry)
        self._ray: ray_metrics.Gauge | ray_metrics.Histogram | None = None
        if in_ray and kind == "histogram":
            self._ray = ray_metrics.Histogram(name, help_text, list(buckets), labels)  # type: ignore[arg-type]
        elif in_ray:
            self._ray = ray_metrics.Gauge(name, help_text, labels)  # type: ignore[arg-type]
        if kind == "count" and not labels:
            self.add(0)  # shown as 0 from the start, so that an alert can tell it from "not there"

    def set(self, value: float, **labels: str) -> None:
        assert self._kind == "gauge"
        self._values[tuple(labels.items())] = value

    def add(self, value: float = 1, **labels: str) -> None:
        assert self._kind == "count"
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0) + value

    def observe(self, value: float) -> None:
        assert self._kind == "histogram"
        self._observed.append(value)

    def publish(self) -> bool:
        """Write what is new to both places. False if that was so much that the rest is left for the next call."""
        if isinstance(self._local, prometheus_client.Histogram):
            for _ in range(min(len(self._observed), MOST_AT_ONCE)):
                value = self._observed.popleft()
                self._local.observe(value)
                if isinstance(self._ray, ray_metrics.Histogram):
                    self._ray.observe(value)
            return not self._observed
        for key, value in self._values.items():
            if self._kind == "count" and self._published.get(key) == value:
                continue
            self._published[key] = value
            labels = dict(key)
            (self._local.labels(**labels) if labels else self._local).set(value)
            if isinstance(self._ray, ray_metrics.Gauge):
                self._ray.set(value, labels)
        return True


class Metrics:
    """Every figure of one replica. Each instance has a registry of its own, so tests and replicas do not meet."""

    def __init__(self, *, in_ray: bool | None = None) -> None:
        """in_ray: record in Ray's metrics too; when None, if this process is connected to a Ray that collects any."""
        self.registry = prometheus_client.CollectorRegistry()
        self._in_ray = _is_collected_by_ray() if in_ray is None else in_ray
        self._figures: list[Figure] = []
        self._recent: deque[tuple[float, int]] = deque()  # (when, tokens) within the rate's window
        self._recent_tokens = 0
        self._timed_ranks: set[int] = set()  # ranks that have a figure
        self._engine: Engine | None = None
        self._watching: asyncio.Task[None] | None = None

        self.tokens_generated_per_second = self._gauge(
            "tokens_generated_per_second", f"New tokens a second over the last {RATE_WINDOW_S:g} s"
        )
        self.prefill_time_ms = self._histogram("prefill_time_ms", "From a request to its first token", PREFILL_MS)
        self.time_to_first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "The same as prefill_time_ms, in seconds", TTFT_S
        )
        self.time_per_decoding_step_ms = self._histogram(
            "time_per_decoding_step_ms", "A step in which every sequence gains one token", STEP_MS
        )
        self.gpu_memory_used_bytes = self._gauge("gpu_memory_used_bytes", "Device memory in use, by rank", ("rank",))
        self.num_requests_running = self._gauge("num_requests_running", "Sequences in the batch")
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Sequences waiting for room")
        self.kv_cache_usage_perc = self._gauge("kv_cache_usage_perc", "Cache blocks in use, 0 to 1")
        self.cuda_oom_errors_count = self._count("cuda_oom_errors_count", "Times a rank ran out of device memory")
        self.invalid_dialog_assertions_count = self._count(
            "invalid_dialog_assertions_count",
            "Dialogs refused: roles out of order, or the template's tags in a message",
        )
        self.non_finite_logits_count = self._count(
            "non_finite_logits_count", "Requests for which the model computed NaN"
        )
        self.rank_failures_count = self._count("rank_failures_count", "Times the rank group failed")
        self.num_ranks = self._gauge(
            "num_ranks", "Ranks that serve; fewer than configured while there is no room for all"
        )
        self.rank_step_ms = self._gauge(
            "rank_step_ms", "Of a step, what a rank computes by itself, without waiting for others", ("rank",)
        )
        self.generated_tokens_count = self._count("generated_tokens_count", "New tokens since the start")
        self.prefix_cache_hit_tokens_count = self._count(
            "prefix_cache_hit_tokens_count", "Tokens found in the cache instead of computed"
        )
        self.draft_tokens_count = self._count("draft_tokens_count", "Proposed tokens that steps have checked")
        self.draft_tokens_accepted_count = self._count(
            "draft_tokens_accepted_count", "Proposed tokens that the model would have drawn itself"
        )
        self.requests_total = self._count(
            "requests_total", "Finished requests, by route and outcome (ok, cancelled or an error's code)",
            ("path", "outcome"),
        )  # fmt: skip

    def first_token(self, seconds: float) -> None:
        """A request's first token came `seconds` after the request."""
        self.prefill_time_ms.observe(1000 * seconds)
        self.time_to_first_token_seconds.observe(seconds)

    def count_invalid_dialog(self) -> None:
        self.invalid_dialog_assertions_count.add()

    def on_failure(self, error: LlamaError) -> None:
        """The ranks have failed, or did not come up."""
        if isinstance(error, RankFailure):
            self.rank_failures_count.add()
        if "OutOfMemoryError" in error.message:
            self.cuda_oom_errors_count.add()

    def tokens_generated(self, num_tokens: int) -> None:
        """So many new tokens, for the sum and the rate."""
        self.generated_tokens_count.add(num_tokens)
        self._recent.append((time.monotonic(), num_tokens))
        self._recent_tokens += num_tokens

    def on_step(self, stats: StepStats) -> None:
        """One step of the engine is done."""
        self.tokens_generated(stats.num_sampled)
        if stats.decode_only:
            self.time_per_decoding_step_ms.observe(stats.elapsed_ms)
        self.prefix_cache_hit_tokens_count.add(stats.num_prefix_hits)
        self.draft_tokens_count.add(stats.num_drafts)
        self.draft_tokens_accepted_count.add(stats.num_drafts_accepted)
        if stats.num_non_finite:
            self.non_finite_logits_count.add(stats.num_non_finite)
        if stats.device_memory_bytes:
            self.gpu_memory_used_bytes.set(stats.device_memory_bytes, rank="0")  # the rank that answers for all

    def on_compute_ms(self, compute_ms: Mapping[int, float]) -> None:
        """What each rank computes of a step by itself, in milliseconds."""
        for rank in self._timed_ranks - compute_ms.keys():  # it is gone, or has had nothing to do
            self.rank_step_ms.set(0.0, rank=str(rank))
        for rank, milliseconds in compute_ms.items():
            self.rank_step_ms.set(milliseconds, rank=str(rank))
        self._timed_ranks |= compute_ms.keys()

    def watch(self, engine: Engine) -> None:
        """Take queue lengths and cache use from `engine` before every rendering and, where a loop runs, every second."""
        self._engine = engine
        try:
            self._watching = asyncio.get_running_loop().create_task(self._keep_fresh())
        except RuntimeError:
            return

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self.refresh()
            for figure in self._figures:
                while not figure.publish():  # noqa: ASYNC110 (nothing is waited for: others get their turn)
                    await asyncio.sleep(0)

    def refresh(self) -> None:
        """Bring up to date what changes without an event: the rate when nothing is generated, and the engine's state."""
        oldest = time.monotonic() - RATE_WINDOW_S
        while self._recent and self._recent[0][0] < oldest:
            self._recent_tokens -= self._recent.popleft()[1]
        self.tokens_generated_per_second.set(self._recent_tokens / RATE_WINDOW_S)
        if self._engine is not None:
            state = self._engine.describe()
            self.engine_state(
                running=_whole(state.get("requests_running")),
                waiting=_whole(state.get("requests_waiting")),
                blocks_used=_whole(state.get("blocks_used")),
                blocks_total=_whole(state.get("blocks_total")),
            )
            self.num_ranks.set(_whole(state.get("world_size")))

    def engine_state(self, *, running: int, waiting: int, blocks_used: int, blocks_total: int) -> None:
        self.num_requests_running.set(running)
        self.num_requests_waiting.set(waiting)
        self.kv_cache_usage_perc.set(blocks_used / blocks_total if blocks_total else 0.0)

    def render(self) -> bytes:
        """Prometheus text."""
        self.refresh()
        for figure in self._figures:
            while not figure.publish():
                pass
        return prometheus_client.generate_latest(self.registry)

    def _gauge(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Figure:
        return self._figure("gauge", name, help_text, labels)

    def _count(self, name: str, help_text: str, labels: tuple[str, ...] = ()) -> Figure:
        return self._figure("count", name, help_text, labels)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Figure:
        return self._figure("histogram", name, help_text, buckets=buckets)

    def _figure(
        self,
        kind: Kind,
        name: str,
        help_text: str,
        labels: tuple[str, ...] = (),
        buckets: tuple[float, ...] = (),
    ) -> Figure:
        figure = Figure(self.registry, kind, name, help_text, labels, buckets=buckets, in_ray=self._in_ray)
        self._figures.append(figure)
        return figure


def _is_collected_by_ray() -> bool:
    is_off = os.environ.get("RAY_enable_metrics_collection", "1") in ("0", "false")  # noqa: SIM112 (Ray's own name)
    return ray.is_initialized() and not is_off


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
