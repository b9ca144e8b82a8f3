"""`llama-ray up` with a misspelt argument."""

import pytest

from tests.support.server import served

pytestmark = pytest.mark.timeout(600)


def test_a_misspelt_argument_stops_the_start_and_is_named() -> None:
    with served(args={"max_batchsize": 4}) as running:
        assert running.process.wait(180) == 1
        assert running.output().splitlines() == ["max_batchsize: no such argument"], "nothing else was started"
        assert running.wait_gone() == {}
