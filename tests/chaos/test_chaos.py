"""The short form of `python -m tests.chaos`: a few faults under live streams; then two Ctrl-C end the server."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.programs import REPOSITORY, environment

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, id="with standby processes"), pytest.param(False, id="without", marks=pytest.mark.full)],
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    report = tmp_path_factory.mktemp("chaos") / "report.json"
    flags = ["--faults", "4", "--streams", "8", "--pause", "1.5", "--step-timeout", "15"]  # a busy machine answers late
    flags += ["--requests", "seeded", "two choices", "logprobs", "cut", "schema", "tool call", "penalties"]
    flags += ["--standby" if request.param else "--no-standby", "--no-timed", "--two-ctrl-c", "--json", str(report)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *flags],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(report.read_text())
    return seen


def test_faults_lose_no_token_of_live_streams(seen: dict[str, Any]) -> None:
    assert seen["lost"] == seen["differing"] == 0 and seen["left"] == []
    assert seen["faults"] >= 4 and seen["recoveries"] >= 2 and seen["answers"] >= 8


def test_a_second_ctrl_c_ends_all_processes_at_once(seen: dict[str, Any]) -> None:
    assert seen["ended"]["status"] == 0
    assert seen["ended"]["left"] == []
