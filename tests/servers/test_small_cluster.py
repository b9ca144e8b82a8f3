"""The Ray cluster that `llama-ray up` starts: a small one, or with LLAMA_DASHBOARD=1 the one that Ray starts by default."""

from typing import Any

import pytest

from deployments.local.small_cluster import OBJECT_STORE_BYTES, SETTINGS
from tests.support.full_runs import with_full_ones
from tests.support.programs import seen_by

PROGRAM = "tests.programs.small_cluster"


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    return seen_by(PROGRAM, RAY_task_events_report_interval_ms="500")


@pytest.fixture(scope="module")
def default() -> dict[str, Any]:
    return seen_by(PROGRAM, LLAMA_DASHBOARD="1")


def count(seen: dict[str, Any], program: str) -> int:
    return sum(program in command for command in seen["children"])


@pytest.mark.parametrize("cluster", with_full_ones(["small", "default"], in_each_run=["small"]))
def test_either_cluster_runs_tasks_in_the_requested_namespace(cluster: str, request: pytest.FixtureRequest) -> None:
    seen = request.getfixturevalue(cluster)
    assert seen["four"] == 4 and seen["namespace"] == "serve"
    assert count(seen, "gcs_server") == count(seen, "raylet/raylet") == count(seen, "log_monitor.py") == 1


def test_a_small_cluster_has_neither_dashboard_nor_autoscaler(small: dict[str, Any]) -> None:
    assert count(small, "dashboard/dashboard.py") == count(small, "monitor.py") - count(small, "log_monitor.py") == 0
    assert not small["dashboard"]


def test_a_small_cluster_listens_on_loopback_and_clients_on_this_machine_find_it(small: dict[str, Any]) -> None:
    assert small["address"].startswith("LOCALHOST:")
    assert small["is_found_there"]


def test_a_small_cluster_reserves_little_memory_for_objects(small: dict[str, Any]) -> None:
    assert small["object_store_bytes"] == OBJECT_STORE_BYTES


def test_variables_that_the_user_has_set_keep_their_values(small: dict[str, Any]) -> None:
    assert small["settings"] == SETTINGS | {"RAY_task_events_report_interval_ms": "500"}


def test_rays_own_classes_are_restored_after_the_start(small: dict[str, Any]) -> None:
    assert small["restored"]


@pytest.mark.full
def test_llama_dashboard_starts_rays_dashboard(default: dict[str, Any]) -> None:
    assert count(default, "dashboard/dashboard.py") == 1
    assert default["dashboard"]
    assert set(default["settings"].values()) == {None}
