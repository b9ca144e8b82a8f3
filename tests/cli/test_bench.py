"""`llama-ray bench` against the real HTTP layer with a scripted engine, and its figures from given times."""

import json
from pathlib import Path

import pytest

from cli.bench import Plan, Sent, bodies_of, percentile, report
from tests.cli.conftest import ScriptedServer, llama_ray
from tests.support.scripted_engine import FakeEngine, serve

SMALL = ("--requests", "9", "--concurrency", "3", "--prompt-tokens", "20", "--max-tokens", "4")


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_request_is_counted_with_its_tokens(endpoint: str, tmp_path: Path) -> None:
    engine = FakeEngine("One two three four five six.", step_s=0.003)
    with serve(engine) as served:
        file = tmp_path / "bench.json"
        done = llama_ray("bench", "--url", served.url, "--endpoint", endpoint, *SMALL, "--json", str(file))
    assert done.returncode == 0, done.stderr
    for word in ("requests/s", "output tokens/s", "TTFT", "TPOT", "ITL", "E2E", "p50", "p90", "p99"):
        assert word in done.stdout
    found = json.loads(file.read_text())
    assert (found["requests"], found["failed"], found["output_tokens"]) == (9, 0, 36)
    asked = {"prompt_tokens": 20, "max_tokens": 4, "warmup": 2, "temperature": 0.0, "ignore_eos": False, "seed": 1}
    assert asked.items() <= found.items()
    assert len(engine.streams) == 9 + 2  # with the warm-up
    if endpoint == "completions":
        assert found["prompt_tokens_mean"] == 20
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"], name
    assert found["ttft_ms"]["p50"] < found["e2e_ms"]["p50"]


def test_errors_are_counted_and_the_status_is_one(scripted: ScriptedServer) -> None:
    done = llama_ray("bench", "--url", scripted.url, "--model", "refuses", *SMALL)
    assert done.returncode == 1 and "9 x HTTP 429: too many requests wait" in done.stdout and "9 failed" in done.stdout
    done = llama_ray("bench", "--url", scripted.url, "--model", "breaks", *SMALL, "--json", "-")
    assert done.returncode == 1 and json.loads(done.stdout)["errors"] == {"the stream ended without [DONE]": 9}


def test_a_server_that_is_absent_is_named() -> None:
    done = llama_ray("bench", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1 and "http://127.0.0.1:9/v1 cannot be reached" in done.stderr


def test_the_figures_of_two_answers() -> None:
    first = Sent(0.0, 1.0, [0.2, 0.4, 1.0], prompt_tokens=7, output_tokens=5)
    second = Sent(1.0, 2.0, [1.6], prompt_tokens=9, output_tokens=1)
    failed = Sent(0.0, 9.0, [0.1], error="HTTP 500")
    found = report(Plan("x"), "x", "m", [first, second, failed], 2.0)
    assert (found["requests"], found["failed"], found["output_tokens"]) == (3, 1, 6)
    assert (found["requests_per_s"], found["output_tokens_per_s"], found["prompt_tokens_mean"]) == (1.0, 3.0, 8.0)
    assert found["ttft_ms"]["p50"] == pytest.approx(400) and found["e2e_ms"]["p99"] == pytest.approx(1000)
    assert found["tpot_ms"]["p50"] == pytest.approx(200)  # 0.8 s for four tokens after the first
    assert found["itl_ms"]["mean"] == pytest.approx(400)
    in_two_events = Sent(0.0, 1.0, [0.2, 0.4], output_tokens=1)
    assert report(Plan("x"), "x", "m", [in_two_events], 1.0)["tpot_ms"]["p50"] is None


def test_percentiles_are_interpolated() -> None:
    assert percentile([], 50) is None
    assert percentile([4.0], 99) == 4.0
    assert percentile([0.0, 10.0, 20.0], 75) == 15.0


def test_prompts_differ_between_requests_and_are_the_same_for_a_seed() -> None:
    plan = Plan("x", prompt_tokens=10)
    texts = [body["messages"][0]["content"] for body in bodies_of(plan, "m", 0, 5)]
    assert len(set(texts)) == 5 and all(len(text.split()) == 10 for text in texts)
    assert texts == [body["messages"][0]["content"] for body in bodies_of(plan, "m", 0, 5)]
