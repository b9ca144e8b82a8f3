"""The metrics: one name for each, a baseline for counts, what events record, and that they work without Ray."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray.serve import metrics as ray_metrics

from deployments.engine.interface import EngineState
from deployments.engine.step_report import StepStats
from deployments.engine.timeline import Timeline
from deployments.observe import metrics as metrics_module
from deployments.observe.metrics import PATHS, Metrics
from llama_core.errors import QueueFull
from llama_core.scheduling.request import FinishReason
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import until
from tests.support.http import samples
from tests.support.requests import submit
from tests.support.scripted_engine import FakeEngine, in_process

REFERENCE = {
    "tokens_generated_per_second": "gauge", "prefill_time_ms": "histogram", "time_per_decoding_step_ms": "histogram",
    "gpu_memory_used_bytes": "gauge", "cuda_oom_errors_count": "gauge", "invalid_dialog_assertions_count": "gauge",
}  # fmt: skip
# As vLLM has them after "vllm:".
VLLM = [
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "prompt_tokens_total", "generation_tokens_total", "kv_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "num_requests_running",
    "num_requests_waiting", "request_success_total", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
]  # fmt: skip


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(model_name="tiny", in_ray=False)


def step(**fields: object) -> StepStats:
    values = {"num_rows": 2, "num_tokens": 2, "num_sampled": 2, "elapsed_ms": 3.0, "num_non_finite": 0,
              "device_memory_bytes": 0, "is_decode": True}  # fmt: skip
    return StepStats(**(values | fields))  # type: ignore[arg-type]


async def test_the_references_metrics_keep_their_names_and_all_others_have_one_prefix(metrics: Metrics) -> None:
    metrics._engine = FakeEngine()
    families = {each.name: each for each in text_string_to_metric_families(metrics.render().decode())}
    others = {name for name in families if name.startswith("llama_")}
    assert {name: each.type for name, each in families.items() if name not in others} == REFERENCE
    assert all(sample.labels["model_name"] == "tiny" for name in others for sample in families[name].samples)
    assert {f"llama_{name}".removesuffix("_total") for name in VLLM} <= others
    assert len({each.documentation for each in families.values()}) == len(families), "none is there twice"


def test_counts_are_counters_and_nothing_else_ends_as_one(metrics: Metrics) -> None:
    lines = metrics.render().decode().splitlines()
    types = dict(line.split()[2:] for line in lines if line.startswith("# TYPE "))
    ends_so = {name for name in types if name.endswith("_total")}
    assert {name for name, kind in types.items() if kind == "counter"} == ends_so
    assert not [name for name in types if name.endswith("_created")]


def test_a_step_counts_prompts_tokens_times_and_faults(metrics: Metrics) -> None:
    metrics.on_step(step(num_sampled=20, num_drafts=7, num_drafts_accepted=5, num_deferred=3))
    metrics.on_step(step(num_sampled=0, is_decode=False, num_non_finite=1, device_memory_bytes=7))
    metrics.on_step(
        step(num_sampled=3, num_prompt_tokens=40, num_prompt_hits=16, token_intervals=[(0.02, 2), (0.3, 1)])
    )
    seen = samples(metrics.render())
    assert seen["llama_generation_tokens_total"] == 23 and seen["tokens_generated_per_second"] == 2.3
    assert (seen["llama_prompt_tokens_total"], seen["llama_prefix_cache_queries_total"]) == (40, 40)
    assert seen["llama_prefix_cache_hits_total"] == 16
    assert seen["llama_deferred_samples_total"] == 3 and seen["llama_non_finite_logits_total"] == 1
    assert seen["llama_spec_decode_num_draft_tokens_total"] == 7
    assert seen["llama_spec_decode_num_accepted_tokens_total"] == 5
    assert (seen["time_per_decoding_step_ms_count"], seen["time_per_decoding_step_ms_sum"]) == (2, 6)
    assert seen['gpu_memory_used_bytes{rank="0"}'] == 7
    assert seen["llama_inter_token_latency_seconds_count"] == 3
    assert seen["llama_inter_token_latency_seconds_sum"] == pytest.approx(0.34)
    buckets = [seen[f'llama_inter_token_latency_seconds_bucket{{le="{le}"}}'] for le in ("0.01", "0.025", "0.3")]
    assert buckets == [0, 2, 3]  # a bound is part of its bucket


def test_an_ended_sequence_counts_the_stages_that_it_reached(metrics: Metrics) -> None:
    whole = Timeline(10.0, admitted_s=10.5, first_token_s=11.5, last_token_s=15.5)
    metrics.sequence_ended(FinishReason.STOP, whole, 7, 3)
    for num_tokens in (1, 0):
        short = Timeline(10.0, admitted_s=10.0, first_token_s=10.0, last_token_s=10.0)
        metrics.sequence_ended(FinishReason.LENGTH, short, 7, num_tokens)
    metrics.sequence_ended(FinishReason.ABORT, Timeline(10.0), 7, 0)
    seen = samples(metrics.render())
    assert seen["llama_request_queue_time_seconds_sum"] == 0.5
    assert seen["llama_request_prefill_time_seconds_sum"] == 1.0
    assert seen["llama_time_to_first_token_seconds_sum"] == 1.5
    assert seen["llama_request_decode_time_seconds_sum"] == 4.0
    assert seen["llama_request_time_per_output_token_seconds_sum"] == 2.0
    assert seen["llama_request_time_per_output_token_seconds_count"] == 1
    assert seen["llama_request_queue_time_seconds_count"] == 3
    reasons = [seen[f'llama_request_success_total{{finished_reason="{each}"}}'] for each in ("stop", "length", "abort")]
    assert reasons == [1, 2, 1]


def test_refusals_are_counted_by_cause_and_failures_are_not(metrics: Metrics) -> None:
    metrics.request_ended("handle", "queue_full", 0.1, None, QueueFull("full"))
    metrics.request_ended("handle", "queue_full", 0.1, 0.05, QueueFull("full"))  # after the first token
    seen = samples(metrics.render())
    assert seen['llama_requests_rejected_total{cause="queue_full"}'] == 1
    assert seen['llama_requests_rejected_total{cause="context_length_exceeded"}'] == 0


async def test_the_gauges_and_totals_show_the_state_of_a_watched_engine(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    metrics.watch(engine)
    submit(engine, [5], SamplingParams())
    seen = samples(metrics.render())
    assert (seen["llama_num_requests_running"], seen["llama_kv_cache_usage_perc"]) == (1, 0.01)
    for preemptions, epoch in ((3, 1), (5, 2)):
        values = {"model": "tiny", "phase": "ready", "world_size": 2, "epoch": epoch, "ranks": (),
                  "spare_ranks_ready": 0, "max_seq_len": 64, "max_seq_len_reason": "as configured", "max_batch_size": 2,
                  "max_step_tokens": 64, "max_queue": 8, "max_queue_tokens": 64, "block_size": 16,
                  "preemptions": preemptions, "requests_waiting": 4}  # fmt: skip
        state = EngineState(**values)  # type: ignore[arg-type]
        monkeypatch.setattr(engine, "describe", lambda state=state: state)
        seen = samples(metrics.render())
    assert (seen["llama_num_preemptions_total"], seen["llama_rank_restarts_total"]) == (5, 2)
    assert (seen["llama_num_requests_waiting"], seen["llama_num_ranks"]) == (4, 2)


async def test_the_counts_of_every_route_of_the_engine_start_at_zero() -> None:
    async with in_process(FakeEngine()) as client:
        document = (await client.get("/openapi.json")).json()
    tagged = {
        path
        for path, item in document["paths"].items()
        if item.get("post", {}).get("tags") in (["generation"], ["scoring"], ["embeddings"])
    }
    assert tagged - {"/v1/messages/count_tokens"} == set(PATHS) - {"handle"}


class RayGauge:
    """Replaces Ray's gauge and stores every recording."""

    recorded: list[tuple[str, float, dict[str, str]]] = []  # noqa: RUF012

    def __init__(self, name: str, *_: object, **__: object) -> None:
        self.name = name

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.recorded.append((self.name, value, dict(tags)))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, dict[str, str]]]:
    monkeypatch.setattr(ray_metrics, "Gauge", RayGauge)
    monkeypatch.setattr(RayGauge, "recorded", [])
    return RayGauge.recorded


async def test_unchanged_counts_are_recorded_in_ray_again_and_again(
    recorded: list[tuple[str, float, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray drops a series that is not recorded for a while, so an alert would see no baseline."""
    monkeypatch.setattr(metrics_module, "REFRESH_S", 0.01)
    monkeypatch.setattr(metrics_module, "RECORD_AGAIN_S", 0.02)
    metrics = Metrics(in_ray=True)
    metrics.requests.add(path="handle", outcome="ok")
    metrics.watch(FakeEngine())
    await until(lambda: [seen[1] for seen in recorded if seen[0] == "cuda_oom_errors_count"][:3] == [0] * 3)
    ok = ("llama_requests_total", 1, {"model_name": "llama", "path": "handle", "outcome": "ok"})
    await until(lambda: recorded.count(ok) >= 3)
