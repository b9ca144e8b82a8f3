"""One engine, four and one again, on nodes that Ray's autoscaler adds and removes."""

import pytest

from tests.programs.elastic import DOWNSCALE_DELAY_S
from tests.support.programs import seen_by

pytestmark = [pytest.mark.timeout(1200), pytest.mark.full]


def test_engines_follow_the_load_and_no_stream_is_lost_or_different() -> None:
    seen = seen_by("tests.programs.elastic", timeout_s=1100)
    assert seen["decisions"][-1] == "4 to 1"
    assert not seen["failed"] and not seen["different"] and seen["answers"] >= 80
    assert seen["one_engine_after_s"] >= DOWNSCALE_DELAY_S / 2
