"""The question `beside`: a short request beside a long prompt, on any server."""

import json
from typing import Any

import pytest

from benchmarks.questions import beside as bench_beside
from tests.support.scripted_engine import MODEL_ID, FakeEngine, serve


def test_the_command_compares_both_requests_with_themselves_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(FakeEngine("One two three four five.", step_s=0.05)) as served:
        sizes = ["--prompt", "8", "--long-prompt", "40", "--output", "3", "--vocab-size", "200", "--rounds", "2"]
        bench_beside.main(["--url", served.url, "--model", MODEL_ID, *sizes])
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    times = result["times_ms"]
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys(times, 2)
    assert result["long_ratio"] == pytest.approx(result["long_beside_p50_ms"] / result["long_alone_p50_ms"], rel=1e-3)
