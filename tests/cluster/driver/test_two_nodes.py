"""Ranks on two nodes: steps go over TLS, and a stopped rank or a lost node ends the group there too."""

from typing import Any

import pytest

from tests.support.programs import seen_by

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def seen(pytestconfig: pytest.Config) -> dict[str, Any]:
    words = ["full"] if pytestconfig.getoption("--full") else []
    return seen_by("tests.programs.two_nodes", *words, timeout_s=1100)


def test_the_model_over_two_nodes_gives_the_references_tokens(seen: dict[str, Any]) -> None:
    assert seen["golden_nodes"] == 2
    assert seen["golden"] is True


def test_steps_reach_ranks_on_two_nodes_over_tls(seen: dict[str, Any]) -> None:
    assert seen["nodes"] == 2
    assert seen["host"] == "127.0.0.1"  # both nodes have one address, so nothing listens beyond this machine
    assert seen["tokens"] is True


def test_a_stopped_rank_on_another_node_is_named_and_killed(seen: dict[str, Any]) -> None:
    assert seen["stopped"] == [True, True]


def test_a_lost_node_is_noticed_and_leaves_no_rank(seen: dict[str, Any]) -> None:
    assert seen["lost_ranks_are_gone"] is True


@pytest.mark.full
def test_the_rank_of_a_lost_node_is_named(seen: dict[str, Any]) -> None:
    assert seen["group_lost"] == [True, True, True]


def test_without_room_for_all_fewer_ranks_go_on_with_every_stream(seen: dict[str, Any]) -> None:
    assert seen["shrunk"] == [1, "with 1 of 2 ranks, for lack of room"]
    assert seen["same"] is True


# In each run, test_fewer_ranks.py has a service take all ranks again when there is room.
@pytest.mark.full
def test_all_ranks_go_on_with_every_stream_when_a_node_joins(seen: dict[str, Any]) -> None:
    assert seen["grown"] == 2 and seen["same"] is True


def test_the_resources_that_a_real_cluster_lacks_are_named(seen: dict[str, Any]) -> None:
    assert seen["shortage"] == "needs 6 CPUs, the cluster has 2 CPUs"
