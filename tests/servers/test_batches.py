"""`llama-ray batch`, and the pipelines of Ray Data, with the demo model."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.programs.batch_kills import lines, said
from tests.support.programs import REPOSITORY, ended, environment, output_of, seen_by
from tests.support.server import WITH_TOKEN, Server, address_of, num_generated, served
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
NUM_LINES = 150


@pytest.fixture(scope="module")
def roomy() -> Iterator[Server]:
    """It leaves a CPU to Ray Data."""
    with served(args={"cpus_per_rank": 0.4}) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch") / "input.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(NUM_LINES)))
    return path


def answers(target: Path) -> dict[str, Any]:
    """What the model has said, by custom_id. Each line has one answer, with status 200."""
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert {line["response"]["status_code"] for line in found} == {200}
    by_id = {line["custom_id"]: said(line) for line in found}
    assert len(by_id) == len(found) == NUM_LINES
    return by_id


def test_a_batch_starts_and_ends_a_server_of_its_own(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    command = [sys.executable, "-m", "cli", "batch", str(source), "-o", str(target), "demo"]
    done = ended(command, {"RAY_ADDRESS": "local"})
    assert done.returncode == 0 and "0 errors" in done.stderr, done.stderr
    assert len(answers(target)) == NUM_LINES


def test_the_pipeline_with_the_model_in_actors_answers_a_parquet_file(tmp_path: Path) -> None:
    example = ["examples/ray_data_actors.py", "--output", str(tmp_path / "answers")]
    assert "100 rows in" in output_of([sys.executable, *example], {"RAY_ADDRESS": "local"})
    rows = pq.read_table(tmp_path / "answers").to_pylist()
    assert len(rows) == 100 and all(re.search("Paris|Rome|Madrid|Berlin|Tokyo", row["answer"]) for row in rows)


def test_a_batch_outlives_its_own_kill_and_a_ranks_and_computes_nothing_twice(
    roomy: Server, source: Path, tmp_path: Path
) -> None:
    plain, target = tmp_path / "plain", tmp_path / "target"
    command = [sys.executable, "-m", "cli", "batch", str(source), "--url", roomy.url, "-o"]
    output_of([*command, str(plain)])
    victim = roomy.get("/props")[1]["ranks"][1]["pid"]
    first = subprocess.Popen([*command, str(target)], cwd=REPOSITORY, env=environment(), stderr=subprocess.DEVNULL)
    wait_until("it answers", lambda: target.exists() and target.read_bytes().count(b"\n") > 20)
    os.kill(victim, signal.SIGKILL)
    first.kill()
    first.wait()
    assert target.read_bytes().count(b"\n") < NUM_LINES, "it was killed too late"
    output_of([*command, str(target)])
    assert answers(target) == answers(plain)
    before = num_generated(roomy)
    assert f"{NUM_LINES}/{NUM_LINES}" in ended([*command, str(target)]).stderr
    assert num_generated(roomy) == before


def test_the_pipeline_over_the_handle_answers_a_parquet_file(roomy: Server, tmp_path: Path) -> None:
    example = ["examples/ray_data_handle.py", "--address", address_of(roomy), "--output", str(tmp_path / "answers")]
    assert "100 rows in" in output_of([sys.executable, *example], WITH_TOKEN)
    rows = pq.read_table(tmp_path / "answers").to_pylist()
    sums = {row["question"]: row["answer"] for row in rows}
    right = [f"{a} + {b} = {a + b}" in sums[f"What is {a} + {b}?"] for a in range(10) for b in range(10)]
    assert len(rows) == 100 and sum(right) > 90


@pytest.mark.full
def test_each_line_is_answered_once_whatever_is_killed() -> None:
    seen = seen_by("tests.programs.batch_kills", "--lines", "300", timeout_s=590)
    assert (seen["answered_once"], seen["differing"]) == (300, 0)
