"""The question `refusals`: every body is refused, and the times of /health are reported."""

import json
from typing import Any

import pytest

from benchmarks.questions import refusals
from tests.support.scripted_engine import FakeEngine, serve


def test_every_body_has_about_the_requested_size() -> None:
    sizes = [len(body) for _, body in refusals.bodies(1_000_000)]
    assert len(sizes) == 4 and all(0.7e6 < size < 1.3e6 for size in sizes)


def test_the_command_reports_the_time_of_health_and_that_all_bodies_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = FakeEngine()
    with serve(engine) as served:
        refusals.main(["--url", served.url, "--clients", "4", "--bytes", "200000", "--seconds", "1"])
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < result["health_p50_ms"] <= result["health_p99_ms"] <= result["health_max_ms"]
    assert set(result["answers"]) == {"400 context_length_exceeded"}
    assert not engine.streams
