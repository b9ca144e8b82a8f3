"""The question `overload`: a server that refuses loses no request."""

import json
from typing import Any

import pytest

from benchmarks.questions import overload as bench_overload
from tests.support.scripted_engine import MODEL_ID, FakeEngine, serve


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
