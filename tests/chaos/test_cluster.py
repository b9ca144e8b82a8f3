"""The short form of `python -m tests.chaos.cluster`: a fault of each kind that does not take long, under live streams."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.free_slots import FreeSlots
from tests.support.programs import REPOSITORY, environment

pytestmark = pytest.mark.timeout(600)
KINDS = ("power", "silence", "rank", "front_power", "adapter", "controller")
REQUESTS = ("adapter", "schema", "adapter", "two choices", "adapter", "tool call", "chat", "logprobs")


@pytest.mark.full  # four engines, two fronts and their nodes: on two cores the other servers would not start beside them
def test_streams_outlive_engines_fronts_connections_and_scaling(tmp_path: Path) -> None:
    flags = ["--faults", str(len(KINDS)), "--kinds", *KINDS, "--requests", *REQUESTS, "--max-tokens", "300"]
    flags += ["--streams", "10", "--slow", "0.2", "--slow-s", "10", "--num-streams", "40", "--pause", "1"]
    flags += ["--ranks", "1", "--max-batch-size", "2", "--free-slot-s", "5"]  # a busy machine is late
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.cluster", *flags, "--json", str(tmp_path / "report.json")],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = json.loads((tmp_path / "report.json").read_text())
    assert seen["lost"] == seen["differing"] == 0
    assert set(seen["kinds"]) == set(KINDS) and seen["answers"] >= 40 and seen["endings"]["adapter: length"] >= 3
    assert seen["slow answers"]["as slow as asked"] >= 4 and len(seen["MB every 30 s"]) >= 4


def test_a_wait_beside_a_free_slot_is_found_unless_no_engine_of_the_model_had_one() -> None:
    found = FreeSlots("http://localhost", max_batch_size=2)

    def look(now_s: float, running: int, phase: str, stream: str = "chat.a.1") -> None:
        engines = [
            {"model": "a", "phase": "ready", "requests_running": running, "requests_waiting": 0},
            {"model": "a", "phase": "silent", "requests_running": 0, "requests_waiting": 0},
            {"model": "b", "phase": "ready", "requests_running": 0, "requests_waiting": 0},
        ]
        found.look({"engines": engines, "streams": [{"request_id": stream, "phase": phase}]}, now_s)

    start_s = time.monotonic()
    for now_s in range(3):
        look(start_s + now_s, 2, "waiting")
    assert not found.waits
    look(start_s + 4.5, 1, "waiting")
    assert found.waits == {"chat.a.1": pytest.approx(2.5)}
    look(start_s + 5, 1, "running")
    look(start_s + 9, 1, "held")
    look(start_s + 10, 1, "held", "adapter.a.2")
    assert found.waits == {"chat.a.1": pytest.approx(2.5)}
