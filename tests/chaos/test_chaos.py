"""The short forms of `python -m tests.chaos`, where two Ctrl-C end the server after a few faults, and of its part `cluster`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import output_of

pytestmark = pytest.mark.timeout(1200)


def report_of(program: str, folder: Path, *flags: str) -> dict[str, Any]:
    output_of([sys.executable, "-m", program, *flags, "--json", str(folder / "report.json")], timeout_s=540)
    seen: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert seen["lost"] == seen["differing"] == 0
    return seen


@pytest.mark.parametrize("standby", ["--standby", pytest.param("--no-standby", marks=pytest.mark.full)])
def test_faults_lose_no_token_of_live_streams_and_a_second_ctrl_c_ends_all_processes(
    standby: str, tmp_path: Path
) -> None:
    flags = ["--faults", "4", "--streams", "8", "--pause", "1.5", "--step-timeout", "15"]  # a busy machine answers late
    flags += ["--requests", "seeded", "two choices", "logprobs", "cut", "schema", "tool call", "penalties"]
    seen = report_of("tests.chaos", tmp_path, *flags, standby, "--no-timed", "--two-ctrl-c")
    assert seen["left"] == [] and seen["faults"] >= 4 and seen["recoveries"] >= 2 and seen["answers"] >= 8
    assert seen["ended"]["status"] == 0 and seen["ended"]["left"] == []


@pytest.mark.full  # four engines, two fronts and their nodes: on two cores the other servers would not start beside them
def test_streams_outlive_engines_fronts_connections_and_scaling(tmp_path: Path) -> None:
    kinds = ("cut", "stop", "rank", "front", "adapter", "controller")
    requests = ("adapter", "schema", "adapter", "two choices", "adapter", "tool call", "chat", "logprobs")
    flags = ["--faults", str(len(kinds)), "--kinds", *kinds, "--requests", *requests, "--max-tokens", "300"]
    flags += ["--streams", "10", "--slow", "0.2", "--slow-s", "10", "--num-streams", "40", "--pause", "1"]
    seen = report_of("tests.chaos.cluster", tmp_path, *flags, "--ranks", "1", "--max-batch-size", "2")
    assert set(seen["kinds"]) == set(kinds) and seen["answers"] >= 40 and seen["endings"]["adapter: length"] >= 3
    assert seen["slow answers"]["as slow as asked"] >= 4
