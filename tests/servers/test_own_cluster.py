"""A cluster that the files and commands of cluster/deploy start: two nodes on this machine."""

from typing import Any

import pytest

from tests.support.programs import seen_by

pytestmark = [pytest.mark.timeout(1200), pytest.mark.full]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return seen_by("tests.programs.own_cluster", timeout_s=1100)


def test_the_shipped_commands_start_a_cluster_that_serves_with_api_keys(seen: dict[str, Any]) -> None:
    assert seen["without_key"] == 401 and seen["ending"] == "length"
    assert [503, "waiting"] in seen["ready_before"], "there was no replica"


def test_haproxy_ends_when_its_raylet_is_killed_and_the_nodes_end_with_all_their_processes(
    seen: dict[str, Any],
) -> None:
    assert seen["haproxy_ends_s"] >= 0
    assert seen["left"] == []
