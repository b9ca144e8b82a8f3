"""The settings that plain `serve run` can make."""

import os
from pathlib import Path

import pytest

from deployments.app import build_app
from deployments.args import ServerArgs
from deployments.local import serve_run
from deployments.local.serve_run import (
    builds_before_ray_starts,
    cluster_variables,
    is_behind_python_proxy,
    replica_variables,
    set_cluster_variables,
)


@pytest.mark.parametrize(
    ("arguments", "builds"),
    [
        (["/x/bin/serve", "run", "deployments.app:build_app"], True),
        (["/x/bin/serve", "build", "deployments.app:app"], False),
        (["/x/bin/llama-ray", "up", "serve_config.yaml"], False),
        (["pytest", "run"], False),
        ([""], False),
    ],
)
def test_only_serve_run_builds_the_application_before_ray_starts(arguments: list[str], builds: bool) -> None:
    assert builds_before_ray_starts(arguments) is builds


def test_serve_run_with_an_import_path_gets_the_variables_of_llama_ray_up(tmp_path: Path) -> None:
    environment = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "OTHER": "x"}
    set_cluster_variables(environment)
    assert environment.keys() == {"OTHER", *cluster_variables(tmp_path)}
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0", "a variable that is set keeps its value"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert Path(environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent.is_dir()


@pytest.mark.parametrize(
    ("environment", "is_behind"),
    [
        ({}, True),
        ({"RAY_SERVE_ENABLE_HA_PROXY": "0"}, True),
        ({"RAY_SERVE_ENABLE_HA_PROXY": "1"}, False),
        ({"RAY_SERVE_ENABLE_DIRECT_INGRESS": "1"}, False),
        ({"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}, False),
    ],
)
def test_a_replica_knows_whether_serves_proxy_in_python_is_in_front(
    environment: dict[str, str], is_behind: bool
) -> None:
    assert is_behind_python_proxy(environment) is is_behind


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The process's environment without Serve's variables."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    monkeypatch.setattr(os, "environ", found)
    monkeypatch.setattr(replica_variables, "__defaults__", (found,))
    monkeypatch.setattr(set_cluster_variables, "__defaults__", (found,))
    return found


def built_runtime_env() -> object:
    application = build_app(ServerArgs(device="cpu"))
    options = application._bound_deployment.ray_actor_options
    return (options or {}).get("runtime_env")


def test_the_application_sets_one_event_loop_unless_the_variable_is_set(variables: dict[str, str]) -> None:
    assert built_runtime_env() == {"env_vars": serve_run.ONE_LOOP}
    variables.update(serve_run.ONE_LOOP)  # as `llama-ray up` does
    assert not built_runtime_env()
