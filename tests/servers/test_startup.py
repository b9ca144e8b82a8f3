"""Starts that cannot succeed: each fails soon, names the faulty file, is never ready, and leaves no rank."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.conftest import flip_a_bit
from tests.support.checkpoints import WIDE, random_weights, split, write
from tests.support.server import served
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def ray_directory() -> Iterator[str]:
    """A short path for the files and the address of a server's Ray, so that it joins no other cluster."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        yield directory


# In each run, `test_upgrade.py` deploys a malicious file, and `test_up.py` has the command end after a failed deployment.
@pytest.mark.full
def test_a_flipped_bit_is_named_and_ends_the_server_with_an_error_and_no_process(
    tmp_path: Path, ray_directory: str
) -> None:
    checkpoint = write(tmp_path / "damaged", split(random_weights(WIDE), 2))
    flip_a_bit(checkpoint / "consolidated.01.pth")
    args = {"ckpt_dir": str(checkpoint), "max_seq_len": 64, "answer_after_s": 20}
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
        assert "damaged/consolidated.01.pth" in line and "does not match its checksum" in line
        assert most > 5
        assert server.wait_gone() == {}


def test_a_misspelt_argument_stops_the_start_and_is_named() -> None:
    with served(args={"max_batchsize": 4}) as running:
        assert running.process.wait(180) == 2
        said = "max_batchsize: no such argument; did you mean max_batch_size?"
        assert running.output().splitlines() == [said], "nothing else was started"
        assert running.wait_gone() == {}


def test_a_missing_shard_is_named_and_ends_the_command_with_an_error_and_no_process(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "damaged", split(random_weights(WIDE), 2))
    (checkpoint / "consolidated.00.pth").unlink()
    with served(args={"ckpt_dir": str(checkpoint)}) as running:
        assert running.process.wait(180) == 1
        (line,) = running.output().splitlines()
        assert "damaged/consolidated.00.pth: this shard is missing" in line
        assert running.wait_gone() == {}
