"""The short form of `python -m tests.chaos`: a few faults under live streams."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import REPOSITORY, environment

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "standby",
    [pytest.param(True, id="with standby processes"), pytest.param(False, id="without", marks=pytest.mark.full)],
)
def test_faults_lose_no_token_of_live_streams(standby: bool, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--faults", "4", "--streams", "8", "--pause", "1.5", "--step-timeout", "6"]
    flags += ["--requests", "seeded", "two choices", "logprobs", "cut", "schema", "shortened", "tool call", "penalties"]
    flags += ["--standby" if standby else "--no-standby", "--no-timed", "--json", str(report)]
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
    seen = json.loads(report.read_text())
    assert seen["lost"] == seen["differing"] == 0 and seen["left"] == []
    assert seen["faults"] >= 4 and seen["recoveries"] >= 2 and seen["answers"] >= 8
