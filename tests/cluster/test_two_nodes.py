"""Ranks on two nodes: steps go over TLS, and a stopped rank or a lost node ends the group there too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seen() -> dict[str, object]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment.pop("RAY_ADDRESS", None)
    finished = subprocess.run(
        [sys.executable, "-m", "tests.cluster.two_nodes"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("SEEN ")]
    assert lines, finished.stdout[-2000:] + finished.stderr[-4000:]
    result: dict[str, object] = json.loads(lines[0].removeprefix("SEEN "))
    return result


def test_the_model_over_two_nodes_gives_the_references_tokens(seen: dict[str, object]) -> None:
    assert seen["golden_nodes"] == 2
    assert seen["golden"] is True


def test_steps_reach_ranks_on_two_nodes_over_tls(seen: dict[str, object]) -> None:
    assert seen["nodes"] == 2
    assert seen["host"] == "127.0.0.1"  # both nodes have one address, so nothing listens beyond this machine
    assert seen["tokens"] is True


def test_a_stopped_rank_on_another_node_is_named_and_killed(seen: dict[str, object]) -> None:
    assert seen["stopped"] == [True, True, True]


def test_a_lost_node_is_noticed_and_leaves_no_rank(seen: dict[str, object]) -> None:
    assert seen["node_lost"] == [True, True, True]
    assert isinstance(seen["node_loss_s"], float)
    assert seen["node_loss_s"] < 5


def test_what_a_real_cluster_lacks_is_said(seen: dict[str, object]) -> None:
    assert seen["shortage"] == "needs 6 CPUs, the cluster has 2 CPUs"
