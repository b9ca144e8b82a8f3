"""A cluster that the files and commands of cluster/deploy start: two nodes on this machine."""

from typing import Any

import pytest

from tests.support.programs import seen_by

pytestmark = pytest.mark.timeout(600)

MOST_DRAINING_S = 20  # with Serve's default of 30, 29 s were seen: the wait begins before `serve deploy` has returned


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return seen_by("tests.programs.own_cluster", timeout_s=540)


def test_the_shipped_commands_start_a_cluster_that_serves_with_api_keys(seen: dict[str, Any]) -> None:
    assert seen["without_key"] == 401
    assert seen["endings"]["length"] > 10


def test_ready_is_answered_503_while_there_is_no_replica(seen: dict[str, Any]) -> None:
    assert [503, "waiting"] in seen["ready_before"]


def test_no_stream_fails_while_the_cluster_scales_and_updates(seen: dict[str, Any]) -> None:
    assert set(seen["endings"]) == {"length"}
    assert seen["max_batch_size"] == 16, "the update took effect"


def test_a_replica_that_leaves_does_not_hold_its_resources_for_serves_default_of_30_s(seen: dict[str, Any]) -> None:
    assert seen["scaled_down_s"] < MOST_DRAINING_S
    assert seen["longest_pause_s"] < MOST_DRAINING_S


def test_an_update_without_room_waits_for_the_streams_of_a_replica_and_not_for_serves_default(
    seen: dict[str, Any],
) -> None:
    """With Serve's default for RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S each replica stops for 30 s or more."""
    assert seen["longest_stop_s"] < MOST_DRAINING_S


def test_the_nodes_end_with_all_their_processes(seen: dict[str, Any]) -> None:
    assert seen["left"] == []
