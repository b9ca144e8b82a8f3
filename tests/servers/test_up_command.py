"""`llama-ray up` with a misspelt argument or without a file: it ends before Ray starts."""

from pathlib import Path

import pytest

from tests.support.checkpoints import WIDE, random_weights, split, write
from tests.support.server import served

pytestmark = pytest.mark.timeout(600)


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
