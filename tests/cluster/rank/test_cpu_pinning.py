"""A process runs on the cores that it claimed, and frees them when it ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.rank.cpu_pinning import claim_cores

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract unix sockets and affinity are Linux's")

CLAIM = """
import sys
from cluster.rank.cpu_pinning import claim_cores
claim = claim_cores(2, range(900, 903))
print(claim.cores if claim else None, flush=True)
sys.stdin.read()
"""
PIN = """
import os
from cluster.rank import cpu_pinning as cores
cores.in_pod = lambda: False
cores.cgroups.cpu_quota = lambda: None
claim = cores.pin_process(1)
print("none free" if claim is None else os.sched_getaffinity(0) == set(claim.cores))
"""
REPOSITORY = Path(__file__).parents[3]


def claiming_process() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CLAIM], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_a_killed_process_frees_its_cores() -> None:
    process = claiming_process()
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "(900, 901)"
    assert claim_cores(2, range(900, 903)) is None
    process.kill()
    process.wait()
    claim = claim_cores(2, range(900, 903))
    assert claim is not None
    claim.release()


def test_a_pinned_process_runs_on_the_core_that_it_claimed() -> None:
    run = subprocess.run([sys.executable, "-c", PIN], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    if run.stdout.strip() == "none free":
        pytest.skip("ranks on this host have all its cores")
    assert run.stdout.strip() == "True", run.stderr
