"""Starts that cannot succeed: each fails soon, names the faulty file, is never ready, and leaves no rank."""

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs.startup import BATCHES, Malicious, flip_a_bit
from tests.support.checkpoints import WIDE, random_weights, split, write
from tests.support.programs import seen_by
from tests.support.server import served
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

NAMED = {
    "missing": ["missing/consolidated.00.pth: this shard is missing"],
    "params": ["params/params.json", "'dim'", "-64"],
    "tokenizer": ["tokenizer/params.json", "700", "640"],
    "truncated": ["truncated/consolidated.01.pth"],
    "flipped": ["flipped/consolidated.01.pth", "checksum"],
    "pickle": ["pickle/consolidated.00.pth", "not a checkpoint that can be loaded safely"],
    "names": ["layers.0.attention.wq.weight is missing from consolidated.00.pth", "layers.9.attention.wq.weight"],
    "nan": ["nan/consolidated.00.pth: layers.1.feed_forward.w2.weight", "not finite"],
}
BATCH_OF = {name: batch for batch, cases in BATCHES.items() for name in cases}


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return seen_by("tests.programs.startup", timeout_s=540)


# In each run, `test_upgrade.py` deploys a damaged file.
@pytest.mark.full
@pytest.mark.parametrize("case", NAMED)
def test_a_failed_deployment_names_the_file_in_the_applications_status(seen: dict[str, Any], case: str) -> None:
    batch = seen["batches"][BATCH_OF[case]]
    assert case in batch["cases"], f"still {batch['states'][case]}"
    failed = batch["cases"][case]
    cause = failed["message"].strip().splitlines()[-1]
    assert all(words in cause for words in NAMED[case]), cause


@pytest.mark.full
@pytest.mark.parametrize("batch", BATCHES)
def test_a_failed_start_is_never_ready_and_leaves_no_rank(seen: dict[str, Any], batch: str) -> None:
    followed = seen["batches"][batch]
    assert 200 not in followed["ready"] and 503 in followed["ready"]
    assert set(followed["states"].values()) == {"DEPLOY_FAILED"}
    assert followed["ranks_left"] == []


@pytest.mark.full
def test_a_fault_visible_in_the_files_stops_a_start_before_any_rank_exists(seen: dict[str, Any]) -> None:
    most_ranks = {batch: followed["most_ranks"] for batch, followed in seen["batches"].items()}
    assert most_ranks.pop("before any rank exists") == 0
    assert all(most_ranks.values()), "the other faults are found by ranks"


@pytest.mark.full
def test_a_malicious_pickle_never_runs(seen: dict[str, Any]) -> None:
    assert "UnpicklingError" in seen["batches"][BATCH_OF["pickle"]]["cases"]["pickle"]["message"]
    assert seen["sprung"] is False


@pytest.fixture
def ray_directory() -> Iterator[str]:
    """A short path for the files and the address of a server's Ray, so that it joins no other cluster."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        yield directory


# In each run, `test_upgrade.py` deploys a malicious file, `test_up_command.py` starts without a file, and `test_up.py` has the
# command end after a failed deployment.
@pytest.mark.full
@pytest.mark.parametrize(
    ("answer_after_s", "fault"),
    [
        pytest.param(20, "does not match its checksum", id="a flipped bit, while requests wait"),
        pytest.param(
            *(0, "not a checkpoint that can be loaded safely"), id="a malicious pickle, while requests are answered 503"
        ),
    ],
)
def test_a_damaged_file_is_named_and_ends_the_server_with_an_error_and_no_process(
    tmp_path: Path, ray_directory: str, answer_after_s: int, fault: str
) -> None:
    checkpoint = write(tmp_path / "damaged", split(random_weights(WIDE), 2))
    if "checksum" in fault:
        flip_a_bit(checkpoint / "consolidated.01.pth")
    else:
        torch.save({"norm.weight": Malicious(tmp_path / "sprung")}, checkpoint / "consolidated.01.pth")
    args = {
        "ckpt_dir": str(checkpoint),
        "tokenizer_path": str(checkpoint / "tokenizer.model"),
        "max_seq_len": 64,
        "answer_after_s": answer_after_s,
    }
    with served(args=args, env={"RAY_TMPDIR": ray_directory}) as server:
        most = 0

        def has_ended() -> bool:
            nonlocal most
            assert server.get("/ready")[0] != 200
            most = max(most, len(server.processes()))
            return server.process.poll() is not None

        wait_until("the command has ended", has_ended, 300, 0.3)
        output = server.output()
        assert server.process.poll() == 1, output[-3000:]
        line = next(line for line in output.splitlines() if "The server cannot start: " in line)
        assert "damaged/consolidated.01.pth" in line and fault in line
        assert not (tmp_path / "sprung").exists()
        assert most > 5
        assert server.wait_gone() == {}


def test_a_server_that_waits_for_resources_ends_at_once_on_sigterm(ray_directory: str) -> None:
    """Serve alone waits at least 30 s for a replica that was never placed."""
    with served(args={"cpus_per_rank": 1000}, env={"RAY_TMPDIR": ray_directory}) as server:
        for words in ("Adding 1 replica", "needs 2000 CPUs, the cluster has"):
            wait_until(f"the server says {words!r}", lambda words=words: words in server.output())  # type: ignore[misc]

        def answered() -> tuple[int, dict[str, Any]] | None:
            answer = server.get("/ready")
            return answer if answer[0] else None

        ready = wait_until("GET /ready is answered", answered)
        assert (ready[0], ready[1].get("phase")) == (503, "waiting"), "HAProxy answers where no replica can"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 0
        assert server.wait_gone() == {}
