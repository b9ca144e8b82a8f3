"""A remote model on a cluster of three nodes, each with a cache of its own."""

import pytest

from tests.support.programs import seen_by

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]


def test_each_node_fetches_once_also_one_that_joins_and_a_damaged_file_is_fetched_again() -> None:
    seen = seen_by("tests.programs.remote_cluster", timeout_s=500)
    assert seen["headers"] < 0.01 and seen["nodes"] == 3
    assert "fetching" in seen["fetching"]
    assert seen["checkpoint"].startswith("hf://lab/tiny@")
    assert seen["caches"] == ["head", "second", "third"]
    assert seen["fetched"] == pytest.approx(4.0, abs=0.01), "each node once, and the damaged file once more"
    assert seen["fetched_at_last"] == pytest.approx(5.0, abs=0.01)
    assert seen["same"] and seen["same_shrunk"] and seen["same_grown"]
