"""Sections that need several GPUs, whose ranks run in processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.child import need_gpus
from benchmarks.gpu.rank_processes import RankProcesses, group_sizes, measure_in_ranks
from benchmarks.gpu.recorder import Recorder, Unavailable
from benchmarks.gpu.settings import Settings
from benchmarks.harness.common import REPOSITORY
from tests.benchmarks.gpu.tiny_sections import OF_RANKS, TINY


@pytest.mark.full
def test_sections_of_several_gpus_run_in_processes_that_gloo_joins(tmp_path: Path) -> None:
    words = [*TINY.arguments, "--out", str(tmp_path), "--only", *OF_RANKS]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    sections = {name: part["figures"] for name, part in json.loads(done.stdout.splitlines()[-1])["sections"].items()}
    ranks = sections["ranks"]
    assert ranks["2_ranks_speedup"]["rows_2_ms"] == pytest.approx(
        ranks["1_rank"]["rows_2_ms"] / ranks["2_ranks"]["rows_2_ms"], rel=1e-4
    )
    lost = sections["rank_loss"]["nccl"]
    assert 0 < lost["memory_free_s"] <= lost["survivor_gone_s"] < 60
    same = {"texts": 8, "same": 8, "first_difference": -1}
    assert sections["rank_texts"].keys() == {
        *(f"{what}_on_{count}" for what in ("twice", "alone_and_in_a_batch") for count in (1, 2)),
        "1_against_2_ranks",
    }
    assert sections["rank_texts"]["twice_on_1"] == sections["rank_texts"]["twice_on_2"] == same


def test_what_ranks_have_measured_is_not_measured_again(tmp_path: Path) -> None:
    record = Recorder(tmp_path / "ranks.json")
    record.put("2_ranks", "stored")
    measure_in_ranks(record, TINY, "decode", 2)
    assert record.figures == {"2_ranks": "stored"}


def test_a_rank_that_fails_ends_the_others_and_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot read its arguments, and rank 0 waits for it, without importing torch."""
    waiting = [sys.executable, "-I", "-c", "import time; time.sleep(60)"]
    begun: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def fails(command: list[str], **options: Any) -> Any:
        process = start(waiting if command[4] == "0" else [*command, "--no-such-option"], **options)
        begun.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", fails)
    with pytest.raises(RuntimeError, match="rank 1 ended with status 2"), RankProcesses("decode", 2, TINY) as ranks:
        list(ranks.figures())
    assert [process.poll() is not None for process in begun] == [True, True]


def test_one_gpu_is_too_few_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    need_gpus(1, Settings())
    with pytest.raises(Unavailable, match="it needs 2 GPUs, torch sees 1"):
        need_gpus(2, Settings())
    need_gpus(2, TINY)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 6)
    assert group_sizes(Settings()) == [2, 4] and group_sizes(TINY) == [2]
