"""Autoscaling: a replica waits for room and serves when a node joins; load adds a second replica, which
ends with its ranks when load falls."""

from typing import Any

import pytest

from tests.support.programs import seen_by

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return seen_by("tests.programs.autoscaling", timeout_s=1100)


def test_a_replica_waits_for_room_says_so_and_serves_when_a_node_joins(seen: dict[str, Any]) -> None:
    room = "needs 2 CPUs, the cluster has 0 CPUs"
    assert f"one replica of golden {room}: it waits until there is room" in seen["warning"]
    assert seen["waiting"] == f"Waiting for room: one replica {room}"
    assert 200 not in seen["ready_without_room"]
    assert len(seen["first"]) == 2, "its two ranks answer"


def test_while_the_ranks_load_requests_are_answered_503_with_retry_after(
    seen: dict[str, Any],
) -> None:
    assert seen["loading"], "the server was ready before it answered while loading"
    for answers in seen["loading"]:
        assert answers["health"] == 200
        status, retry_after_s, phase = answers["ready"]
        assert (status, phase) == (503, "loading") and int(retry_after_s) >= 1
        status, retry_after_s, body = answers["completion"]
        assert status == 503 and int(retry_after_s) >= 1
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == "not_ready" and "loading" in body["error"]["message"]


def test_load_adds_a_replica_where_a_cluster_autoscaler_sees_its_placement_group_wait(seen: dict[str, Any]) -> None:
    assert seen["groups_while_waiting"] == ["CREATED", "PENDING"]
    assert seen["autoscaler_sees_cpus"] == [2.0]
    assert seen["replicas_while_waiting"] == 1
    # The program has waited for two placement groups, and for requests that run on both replicas.
    assert seen["ranks_under_load"] == 4


def test_when_load_falls_one_replica_ends_and_no_request_fails_meanwhile(seen: dict[str, Any]) -> None:
    assert seen["groups_left"] == ["CREATED"]
    assert seen["left_is_one_replica"] and len(seen["left"]) == 2
    assert seen["answers"] == seen["left"], "the replica that is left answers"
    assert set(seen["endings"]) == {"length"}
    assert seen["endings"]["length"] >= 5  # 4 while the second one waited, 1 after it had gone


def test_the_server_ends_with_its_ranks_and_placement_groups(seen: dict[str, Any]) -> None:
    assert seen["exit"] == 0
    assert seen["groups_after"] == [] and seen["ranks_after"] == 0
