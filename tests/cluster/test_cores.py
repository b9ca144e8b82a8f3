"""Cores that one process has claimed, no other gets, until it ends in whatever way."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.cores import claim_cores, cpu_quota

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract unix sockets and affinity are Linux's")

CLAIM = """
import sys
from cluster.cores import claim_cores
claim = claim_cores(2, range(900, 903))
print(claim.cores if claim else None, flush=True)
sys.stdin.read()
"""
REPOSITORY = Path(__file__).parents[2]


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
