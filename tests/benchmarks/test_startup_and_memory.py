"""The inputs of `startup` and `memory`: the server's log lines, and /proc."""

import logging
import os
import subprocess
import sys
import time

import pytest

from benchmarks.harness import processes
from benchmarks.questions.memory import plans, totals
from benchmarks.questions.startup import PHASES, is_good, points
from llama_core import Llama
from tests.conftest import GOLDEN
from tests.support.waiting import wait_until


def stamped(seconds: int, text: str) -> str:
    return f"(RankWorker pid=7) {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))},250 INFO {text}"


def test_a_phase_ends_with_the_last_log_line_of_its_ranks() -> None:
    lines = [
        stamped(1003, "Started a local Ray instance."),
        stamped(1005, "cluster.rank.cpu_pinning cores=0"),
        stamped(1007, "cluster.rank.cpu_pinning cores=1"),
        stamped(1009, "Started a local Ray instance."),
        "no time, cluster.rank.rank_process loaded bytes=1",
    ]
    assert points("\n".join(lines), began=1000.0) == {
        "Ray's own processes run": pytest.approx(3.25),
        "the ranks' processes run": pytest.approx(7.25),
    }
    assert next(iter(PHASES)) == "Ray's own processes run"


def test_only_a_completion_with_a_token_is_a_good_answer() -> None:
    assert is_good({"choices": [{"text": "x"}]})
    assert is_good({"choices": [{"message": {"content": "x"}}]})
    assert is_good({"choices": [{"text": ""}], "usage": {"completion_tokens": 1}})
    assert not is_good({"choices": [{"text": ""}], "usage": {"completion_tokens": 0}})
    assert not is_good({"error": {"code": "not_ready"}})


def test_the_memory_plan_is_read_from_a_ranks_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llama_core"):
        llama = Llama.build(GOLDEN / "mp1", GOLDEN / "mp1" / "tokenizer.model", 64, 2, device="cpu")
        llama.generate([[1, 5]], 1)
    (plan,) = plans(caplog.text).values()
    assert plan.keys() == {"weights", "cache", "working"} and min(plan.values()) > 0


def test_a_process_is_counted_with_its_descendants() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        wait_until("the program has a child", lambda: len(processes.of_programs([child.pid])) == 2, pause_s=0.02)
        found = processes.of_programs([child.pid])
        child.communicate(b"\n")
    pids = [process.pid for process in found]  # in no known order, because the kernel's ids start again at the lowest
    assert child.pid in pids and len(found) == 2
    assert os.getpid() not in pids
    sums = totals(found)
    assert sums["threads"] == 2 and sums["rss_bytes"] >= sums["pss_bytes"] > 0
    assert all(process.peak_rss_bytes >= process.rss_bytes for process in found)
