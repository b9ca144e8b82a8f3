"""The question `overload`: how answers are counted, where the peak is, and that a server that refuses loses no request."""

import json
from typing import Any

import pytest

from benchmarks.harness.load import Answer
from benchmarks.questions import overload as bench_overload
from benchmarks.questions.overload import Due, figures, peak_of
from tests.support.scripted_engine import MODEL_ID, FakeEngine, serve


def test_answers_are_whole_refused_or_lost() -> None:
    whole = Answer(1.0, 3.0, [1.5, 2.0, 2.5, 3.0], 8)
    refused = Answer(2.0, 2.25, error="HTTP 429", status=429, retry_after="3")
    without_time = Answer(2.0, 2.01, error="HTTP 429", status=429)
    cut = Answer(1.0, 2.0, [1.5], error="the stream ended without [DONE]")
    seen = [Due(whole, 0.9), Due(refused, 1.95), Due(without_time, 2.0), Due(cut, 1.0)]
    found = figures(seen, began_s=0.0, end_s=2.75, client_cpu_s=1.0)
    assert (found["whole"], found["refused"], found["lost"]) == (1, 1, 2)
    assert found["ttft_p99_ms"] == pytest.approx(600), "from when it was due"
    assert found["refused_p99_ms"] == pytest.approx(300)
    window = 2.75 * (1 - bench_overload.WARM_UP_SHARE)
    assert found["goodput_tok_s"] == pytest.approx(6 / window), "tokens after the window are not counted"
    assert found["client_cpu_cores"] == pytest.approx(1 / 3)


def test_the_peak_is_at_the_fewest_clients_within_two_percent_of_the_best() -> None:
    goodput = {8: 50.0, 16: 99.0, 24: 100.0, 32: 98.5}
    assert peak_of({clients: {"goodput_tok_s": rate} for clients, rate in goodput.items()}) == 16


def test_the_command_loses_nothing_on_a_server_that_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine("One two three four five.", step_s=0.01)
    engine.max_streams = 4
    with serve(engine) as served:
        # A pause of the machine in too short a peak leaves no goodput, or one so low that four times as much is no overload.
        load = ["--clients", "2", "4", "--peak-seconds", "2", "--seconds", "1", "--factor", "4"]
        sizes = ["--prompt", "8", "--output", "10", "--vocab-size", "200"]
        bench_overload.main(["--url", served.url, "--model", MODEL_ID, *load, *sizes])
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    over = result["overload"]
    assert over["lost"] == 0 and over["whole"] > 0 and over["refused"] > 0
    assert over["requests"] == over["whole"] + over["refused"]
    peaks = (result["peak"]["goodput_tok_s"], result["peak_again"]["goodput_tok_s"])
    assert result["goodput_of_peak"] == pytest.approx(over["goodput_tok_s"] / (sum(peaks) / 2), rel=1e-4)
    assert result["peak_clients"] in (2, 4)
