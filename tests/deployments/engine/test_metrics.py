"""The operators' metrics: their names, that counts have a baseline and stay recorded, and that they work without Ray."""

import httpx
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray.serve import metrics as ray_metrics

from deployments.engine import metrics as metrics_module
from deployments.engine.metric import BATCH_SIZE
from deployments.engine.metrics import PATHS, Metrics
from deployments.engine.step_stats import StepStats
from deployments.http.app import build_http_app
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import until
from tests.support.scripted_engine import FakeEngine

NAMES = [
    "tokens_generated_per_second", "gpu_memory_used_bytes", "cuda_oom_errors_count", "invalid_dialog_assertions_count",
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "requests_total", "non_finite_logits_total",
    "rank_failures_total",
]  # fmt: skip
HISTOGRAMS = ["prefill_time_ms", "time_per_decoding_step_ms", "time_to_first_token_seconds"]


def samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def step(**fields: object) -> StepStats:
    values = {"num_rows": 2, "num_tokens": 2, "num_sampled": 2, "elapsed_ms": 3.0, "num_non_finite": 0,
              "device_memory_bytes": 0, "is_decode": True}  # fmt: skip
    return StepStats(**(values | fields))  # type: ignore[arg-type]


def test_every_name_that_operators_watch_is_there() -> None:
    metrics = Metrics(in_ray=False)
    metrics.gpu_memory_used_bytes.set(5, rank="0")
    metrics.requests_total.add(path="/", outcome="ok")
    seen = samples(metrics)
    assert set(NAMES) <= set(seen)
    assert {name + "_count" for name in HISTOGRAMS} <= set(seen)


def test_a_count_starts_at_zero_and_only_grows() -> None:
    metrics = Metrics(in_ray=False)
    assert samples(metrics)["cuda_oom_errors_count"] == 0
    metrics.cuda_oom_errors_total.add()
    metrics.cuda_oom_errors_total.add(2)
    assert samples(metrics)["cuda_oom_errors_count"] == 3


def test_a_step_counts_its_tokens_and_its_time() -> None:
    metrics = Metrics(in_ray=False)
    metrics.on_step(step(num_sampled=20, num_prefix_hits=32, num_drafts=7, num_drafts_accepted=5, num_deferred=3))
    metrics.on_step(step(num_sampled=0, is_decode=False, num_non_finite=1, device_memory_bytes=7))
    seen = samples(metrics)
    assert seen["generated_tokens_total"] == 20
    assert seen["prefix_cache_hit_tokens_total"] == 32
    assert seen["deferred_samples_total"] == 3
    assert (seen["draft_tokens_total"], seen["draft_tokens_accepted_total"]) == (7, 5)
    assert seen["tokens_generated_per_second"] == 2.0
    assert seen["time_per_decoding_step_ms_count"] == 1
    assert seen["time_per_decoding_step_ms_sum"] == 3
    assert seen["non_finite_logits_total"] == 1
    assert seen["gpu_memory_used_bytes"] == 7


def test_the_first_token_is_timed_in_both_units() -> None:
    metrics = Metrics(in_ray=False)
    metrics.first_token(0.25)
    seen = samples(metrics)
    assert seen["prefill_time_ms_sum"] == 250
    assert seen["time_to_first_token_seconds_sum"] == 0.25


async def test_the_gauges_show_the_load_of_a_watched_engine() -> None:
    metrics, engine = Metrics(in_ray=False), FakeEngine()
    metrics.watch(engine)
    engine.submit([5], SamplingParams())
    seen = samples(metrics)
    assert seen["num_requests_running"] == 1
    assert seen["kv_cache_usage_perc"] == 0.01


def test_two_replicas_in_one_process_do_not_share_metrics() -> None:
    first, second = Metrics(in_ray=False), Metrics(in_ray=False)
    first.rank_failures_total.add()
    assert samples(second)["rank_failures_total"] == 0


def test_a_histogram_is_published_in_pieces_and_loses_nothing() -> None:
    metrics = Metrics(in_ray=False)
    for _ in range(2 * BATCH_SIZE + 1):
        metrics.on_step(step())
    pieces = [metrics.time_per_decoding_step_ms.publish() for _ in range(3)]
    assert pieces == [False, False, True]
    assert samples(metrics)["time_per_decoding_step_ms_count"] == 2 * BATCH_SIZE + 1


def test_a_ray_that_collects_no_metrics_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setenv("RAY_enable_metrics_collection", "0")
    metrics = Metrics()
    metrics.on_step(step(num_sampled=3))
    assert metrics.generated_tokens_total._ray is None
    assert samples(metrics)["generated_tokens_total"] == 3


class RayGauge:
    """Replaces Ray's gauge and stores every recording."""

    recorded: list[tuple[str, float, dict[str, str]]] = []  # noqa: RUF012

    def __init__(self, name: str, *_: object, **__: object) -> None:
        self.name = name

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.recorded.append((self.name, value, tags))


async def test_unchanged_counts_are_recorded_in_ray_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray drops a series that is not recorded for a while, so an alert would see no baseline."""
    monkeypatch.setattr(ray_metrics, "Gauge", RayGauge)
    monkeypatch.setattr(ray_metrics, "Histogram", RayGauge)
    monkeypatch.setattr(metrics_module, "REFRESH_S", 0.01)
    monkeypatch.setattr(metrics_module, "RECORD_AGAIN_S", 0.02, raising=False)
    monkeypatch.setattr(RayGauge, "recorded", [])
    metrics = Metrics(in_ray=True)
    metrics.requests_total.add(path="handle", outcome="ok")
    metrics.watch(FakeEngine())
    await until(lambda: [seen[1] for seen in RayGauge.recorded if seen[0] == "cuda_oom_errors_count"][:3] == [0] * 3)
    ok = ("requests_total", 1, {"path": "handle", "outcome": "ok"})
    await until(lambda: RayGauge.recorded.count(ok) >= 3)


def test_known_label_values_start_at_zero() -> None:
    metrics = Metrics(in_ray=False)
    text = metrics.render().decode()
    for path in PATHS:
        for outcome in ("ok", "cancelled", "queue_full", "rank_failure", "internal_error"):
            assert f'requests_total{{outcome="{outcome}",path="{path}"}} 0.0' in text


async def test_the_counts_of_every_generating_and_scoring_route_start_at_zero() -> None:
    app = build_http_app(FakeEngine(), Metrics(in_ray=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        document = (await client.get("/openapi.json")).json()
    tagged = {
        path
        for path, item in document["paths"].items()
        if item.get("post", {}).get("tags") in (["generation"], ["scoring"])
    }
    assert tagged - {"/v1/messages/count_tokens"} == set(PATHS) - {"handle"}


def test_renamed_counts_keep_their_old_names_for_one_release() -> None:
    metrics = Metrics(in_ray=False)
    metrics.on_step(step(num_sampled=3, num_drafts=2))
    seen = samples(metrics)
    for name in ("generated_tokens", "prefix_cache_hit_tokens", "draft_tokens", "draft_tokens_accepted",
                 "non_finite_logits", "rank_failures"):  # fmt: skip
        assert seen[f"{name}_total"] == seen[f"{name}_count"]
    assert seen["generated_tokens_count"] == 3


def test_counts_are_counters_and_nothing_else_ends_as_one() -> None:
    metrics = Metrics(in_ray=False)
    metrics.first_token(0.2)
    metrics.requests_total.add(path="handle", outcome="ok")
    types = {}
    for line in metrics.render().decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            types[name] = kind
    assert {name for name, kind in types.items() if kind == "counter"} == {
        name for name in types if name.endswith("_total")
    }
    assert not [name for name in types if name.endswith("_created")]
    assert {kind for name, kind in types.items() if name.endswith("_count")} <= {"untyped", "unknown"}
    assert types["requests_total"] == "counter"


def test_the_references_counts_keep_their_names_beside_the_usual_ones() -> None:
    metrics = Metrics(in_ray=False)
    metrics.count_invalid_dialog()
    seen = samples(metrics)
    assert seen["invalid_dialog_assertions_count"] == seen["invalid_dialog_assertions_total"] == 1
