"""No other process gets a claimed core until the claiming process has ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.rank import cpu_pinning as cores
from cluster.rank.cpu_pinning import claim_cores, cpu_quota, physical_cores_first

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
cores.cpu_quota = lambda path: None
claim = cores.pin_process(1)
print("none free" if claim is None else os.sched_getaffinity(0) == set(claim.cores))
"""
REPOSITORY = Path(__file__).parents[3]


def claiming_process() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CLAIM], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_two_claims_are_disjoint() -> None:
    first, second = claim_cores(2, range(910, 914)), claim_cores(2, range(910, 914))
    assert first is not None
    assert second is not None
    assert (first.cores, second.cores) == ((910, 911), (912, 913))
    first.release()
    second.release()


def test_too_few_free_cores_keep_none() -> None:
    first = claim_cores(2, range(920, 923))
    assert first is not None
    assert claim_cores(2, range(920, 923)) is None
    rest = claim_cores(1, range(920, 923))
    assert rest is not None
    assert rest.cores == (922,)
    first.release()
    rest.release()


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


@pytest.mark.parametrize(
    ("text", "cpus"), [("max 100000", None), ("150000 100000", 1.5), ("", None), ("nonsense 0", None), ("5 0", None)]
)
def test_cpu_quota_is_read_in_cpus(tmp_path: Path, text: str, cpus: float | None) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert cpu_quota(path) == cpus


def test_no_quota_file_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("lists", "allowed", "order"),
    [
        (["0-1", "0-1", "2-3", "2-3"], range(4), [0, 2, 1, 3]),
        (["0,2", "1,3", "0,2", "1,3"], range(4), [0, 1, 2, 3]),
        (["0-1", "0-1", "2-3", "2-3"], [1, 2, 3], [1, 2, 3]),  # CPU 0 is not allowed, so CPU 1 is the first of its core
        (["0", "1", "nonsense"], [2, 1, 0], [0, 1, 2]),
        ([], [3, 1], [1, 3]),
    ],
    ids=["neighbours", "halves", "subset", "no hyperthreads", "no topology"],
)
def test_every_core_comes_before_any_second_thread(
    tmp_path: Path, lists: list[str], allowed: list[int], order: list[int]
) -> None:
    for cpu, text in enumerate(lists):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    assert physical_cores_first(allowed, tmp_path) == order


@pytest.mark.parametrize(("num_others_cpus", "is_pinned"), [(0, False), (1, True)], ids=["every CPU", "a cpuset"])
def test_in_a_pod_only_a_cpuset_is_pinned(
    monkeypatch: pytest.MonkeyPatch, num_others_cpus: int, is_pinned: bool
) -> None:
    allowed = {940, 941}
    pinned: list[object] = []
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(cores, "cpu_quota", lambda path: None)
    monkeypatch.setattr(os, "cpu_count", lambda: len(allowed) + num_others_cpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, chosen: pinned.append(chosen))
    claim = cores.pin_process(1)
    assert (claim is not None) == bool(pinned) == is_pinned
    if claim is not None:
        assert claim.cores == (940,)
        claim.release()


def test_a_pinned_process_runs_on_the_core_that_it_claimed() -> None:
    run = subprocess.run([sys.executable, "-c", PIN], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    if run.stdout.strip() == "none free":
        pytest.skip("ranks on this host have all its cores")
    assert run.stdout.strip() == "True", run.stderr
