"""More requests than the server can take, through Ray Serve: a short form of `python -m benchmarks overload`."""

import json
from typing import Any

import pytest

from benchmarks.questions import overload as bench_overload
from tests.support.server import Server, is_idle
from tests.support.waiting import wait_until


def test_under_overload_every_answer_is_complete_or_refused_and_the_server_is_idle_afterwards(
    demo: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--clients", "4", "40", "--peak-seconds", "0.5", "--seconds", "1.5", "--factor", "3"]
    sizes = [
        "--prompt",
        "16",
        "--output",
        "16",
        "--vocab-size",
        "500",
    ]  # short answers, so that the queue is soon empty
    bench_overload.main(["--url", demo.url, "--model", "llama-demo", *load, *sizes])
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    over = result["overload"]
    assert over["lost"] == 0 and over["whole"] > 0
    assert over["requests"] == over["whole"] + over["refused"]
    wait_until("the server is idle", lambda: is_idle(demo))
