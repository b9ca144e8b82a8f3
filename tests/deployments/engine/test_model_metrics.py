"""Metrics under vLLM's names: each is there before the first request, labelled by model, and counts what its name says."""

import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deployments.engine.bucket_histogram import BucketHistogram
from deployments.engine.interface import EngineState
from deployments.engine.metric_set import MetricSet
from deployments.engine.metrics import Metrics
from deployments.engine.step_stats import StepStats
from deployments.engine.timeline import Timeline
from llama_core.scheduling.request import FinishReason
from tests.support.scripted_engine import FakeEngine

SUFFIXES = [
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "prompt_tokens_total", "generation_tokens_total", "kv_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "num_requests_running",
    "num_requests_waiting", "request_success_total", "requests_rejected_total", "rank_restarts_total",
    "num_ranks",
]  # fmt: skip


def values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Each sample of the model's metrics, by its name and the values of its labels but the model's."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.name.startswith("llama_"):
                labels = dict(sample.labels)
                assert labels.pop("model_name") == "tiny"
                found[(sample.name, *(labels[key] for key in sorted(labels)))] = sample.value
    return found


def state(**fields: object) -> EngineState:
    engine = FakeEngine.__new__(FakeEngine)  # its state needs no tokenizer
    del engine
    values = {"model": "tiny", "phase": "ready", "world_size": 2, "epoch": 0, "ranks": (), "spare_ranks_ready": 0,
              "max_seq_len": 64, "max_seq_len_reason": "as configured", "max_batch_size": 2, "max_step_tokens": 64,
              "max_queue": 8, "max_queue_tokens": 64, "block_size": 16}  # fmt: skip
    return EngineState(**(values | fields))  # type: ignore[arg-type]


def step(**fields: object) -> StepStats:
    values = {"num_rows": 2, "num_tokens": 2, "num_sampled": 2, "elapsed_ms": 3.0, "num_non_finite": 0,
              "device_memory_bytes": 0, "is_decode": True}  # fmt: skip
    return StepStats(**(values | fields))  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(model_name="tiny", in_ray=False)


async def test_every_name_is_there_before_the_first_request(metrics: Metrics) -> None:
    engine = FakeEngine()
    metrics._engine = engine
    names = {key[0] for key in values(metrics)}
    for suffix in SUFFIXES:
        assert {f"llama_{suffix}", f"llama_{suffix}_count"} & names, suffix


def test_a_step_counts_prompts_tokens_and_intervals(metrics: Metrics) -> None:
    metrics.on_step(
        step(num_sampled=3, num_prompt_tokens=40, num_prompt_hits=16, token_intervals=[(0.02, 2), (0.3, 1)])
    )
    seen = values(metrics)
    assert seen["llama_generation_tokens_total",] == 3
    assert (seen["llama_prompt_tokens_total",], seen["llama_prefix_cache_queries_total",]) == (40, 40)
    assert seen["llama_prefix_cache_hits_total",] == 16
    assert seen["llama_inter_token_latency_seconds_count",] == 3
    assert seen["llama_inter_token_latency_seconds_sum",] == pytest.approx(0.34)
    assert seen["llama_inter_token_latency_seconds_bucket", "0.01"] == 0
    assert seen["llama_inter_token_latency_seconds_bucket", "0.025"] == 2
    assert seen["llama_inter_token_latency_seconds_bucket", "0.3"] == 3  # a bound is part of its bucket


def test_a_sequence_that_ends_counts_the_stages_that_it_reached(metrics: Metrics) -> None:
    whole = Timeline(10.0, admitted_s=10.5)
    assert whole.gained(11.5, 4.0) is None
    assert whole.gained(12.0, 3.0) == 0.5
    assert whole.gained(13.5, 3.0) == 1.5
    metrics.model.on_end(FinishReason.STOP, whole, 7, 3)
    for num_tokens in (1, 2):
        short = Timeline(10.0, admitted_s=10.0, first_token_s=10.0, last_token_s=9.0 + num_tokens)
        metrics.model.on_end(FinishReason.LENGTH, short, 7, num_tokens)
    metrics.model.on_end(FinishReason.ABORT, Timeline(10.0), 7, 0)
    seen = values(metrics)
    assert (whole.num_steps, whole.forward_ms) == (2, 6.0)
    assert (seen["llama_request_prompt_tokens_sum",], seen["llama_request_generation_tokens_sum",]) == (28, 6)
    assert seen["llama_request_queue_time_seconds_sum",] == 0.5
    assert seen["llama_request_prefill_time_seconds_sum",] == 1.0
    assert seen["llama_request_decode_time_seconds_sum",] == 3.0
    assert seen["llama_request_time_per_output_token_seconds_sum",] == 2.0
    assert seen["llama_request_time_per_output_token_seconds_count",] == 2
    assert seen["llama_request_queue_time_seconds_count",] == 3
    assert [seen["llama_request_success_total", reason] for reason in ("stop", "length", "abort")] == [1, 2, 1]
    assert seen["llama_request_success_total", "error"] == 0


def test_the_engines_totals_are_copied(metrics: Metrics) -> None:
    metrics.model.refresh(state(blocks_total=8, blocks_used=2, preemptions=3, epoch=1, requests_waiting=4))
    metrics.model.refresh(state(blocks_total=8, blocks_used=2, preemptions=5, epoch=2, requests_waiting=1))
    metrics.on_compute_ms({0: 2.0, 1: 3.0})
    metrics.on_compute_ms({0: 4.0})
    seen = values(metrics)
    assert seen["llama_kv_cache_usage_perc",] == 0.25
    assert seen["llama_num_preemptions_total",] == 5
    assert seen["llama_rank_restarts_total",] == 2
    assert seen["llama_num_requests_waiting",] == 1
    assert (seen["llama_rank_step_seconds", "0"], seen["llama_rank_step_seconds", "1"]) == (0.004, 0.0)


def test_refusals_are_counted_by_cause(metrics: Metrics) -> None:
    metrics.model.reject("queue_full")
    seen = values(metrics)
    assert seen["llama_requests_rejected_total", "queue_full"] == 1
    assert seen["llama_requests_rejected_total", "context_length_exceeded"] == 0


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which Debian's prometheus has")
def test_promtool_finds_no_fault_in_the_models_metrics(metrics: Metrics) -> None:
    metrics.on_step(step(token_intervals=[(0.1, 1)]))
    metrics.on_compute_ms({0: 2.0})
    done = subprocess.run(["promtool", "check", "metrics"], input=metrics.render(), capture_output=True)
    faults = [line for line in (done.stdout + done.stderr).decode().splitlines() if line.startswith("llama_")]
    assert faults == []


class RayGauge:
    """Replaces Ray's gauge."""

    def __init__(self, name: str, *_: object) -> None:
        self.name = name
        self.seen: dict[str, float] = {}

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.seen[tags.get("le", "")] = value


def test_ray_gets_a_histograms_series_as_gauges_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.engine.bucket_histogram.ray_metrics.Gauge", RayGauge)
    monkeypatch.setattr("deployments.engine.bucket_histogram.SERIES_A_CALL", 2)
    registry = MetricSet(in_ray=False).registry
    histogram = BucketHistogram(registry, "x_seconds", "Seconds", (1.0, 2.0), {"model_name": "tiny"}, in_ray=True)
    histogram.observe(0.5, 3)
    histogram.observe(9.0)
    assert [histogram.publish() for _ in range(3)] == [False, False, True]
    assert histogram._ray is not None
    bucket, total, count = (gauge.seen for gauge in histogram._ray)  # type: ignore[attr-defined]
    assert bucket == {"1.0": 3, "2.0": 3, "+Inf": 4}
    assert (total[""], count[""]) == (10.5, 4)
    assert histogram.publish()  # nothing has changed
