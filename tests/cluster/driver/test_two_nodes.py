"""Ranks on two nodes: steps go over TLS, and a stopped rank or a lost node ends the group there too."""

from typing import Any

import pytest

from tests.support.programs import seen_by

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def seen(pytestconfig: pytest.Config) -> dict[str, Any]:
    words = ["full"] if pytestconfig.getoption("--full") else []
    return seen_by("tests.programs.two_nodes", *words, timeout_s=1100)


def test_ranks_on_two_nodes_serve_end_and_shrink_as_on_one(seen: dict[str, Any]) -> None:
    assert seen["golden_nodes"] == 2 and seen["golden"] is True, "the reference's tokens"
    assert seen["nodes"] == 2 and seen["tokens"] is True, "steps over TLS"
    assert seen["host"] == "127.0.0.1", "both nodes have one address, so nothing listens beyond this machine"
    assert seen["stopped"] == [True, True], "a stopped rank on another node is named and killed"
    assert seen["lost_ranks_are_gone"] is True
    assert seen["shrunk"] == [1, "with 1 of 2 ranks, for lack of room"] and seen["same"] is True
    assert seen["shortage"] == "needs 6 CPUs, the cluster has 2 CPUs"


# In each run, test_fewer_ranks.py has a service take all ranks again when there is room.
@pytest.mark.full
def test_the_rank_of_a_lost_node_is_named_and_all_go_on_when_a_node_joins(seen: dict[str, Any]) -> None:
    assert seen["group_lost"] == [True, True, True] and seen["grown"] == 2
