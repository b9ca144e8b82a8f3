"""The short form of `python -m tests.chaos.cluster`: a fault of each kind that does not take long, under live streams."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.programs import REPOSITORY, environment

pytestmark = pytest.mark.timeout(600)
KINDS = ("engine", "cut", "rank", "down", "front", "controller")
REQUESTS = ("adapter", "schema", "adapter", "two choices", "adapter", "tool call", "chat", "logprobs")


def test_streams_outlive_engines_fronts_connections_and_scaling(tmp_path: Path) -> None:
    flags = ["--faults", str(len(KINDS)), "--kinds", *KINDS, "--requests", *REQUESTS, "--max-tokens", "300"]
    flags += ["--streams", "10", "--slow", "0.2", "--slow-s", "10", "--num-streams", "40", "--pause", "1"]
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
