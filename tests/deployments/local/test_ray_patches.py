"""The guard on Ray's version. The table of patches agrees with Ray and with the docs."""

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import ray

from deployments.local import controller_interval, loopback, ray_patches, shutdown, small_cluster
from deployments.local.ray_patches import PATCHES, is_supported, report_unsupported

ROOM = Path(small_cluster.__file__).parent


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_each_patch_names_an_object_of_ray_that_its_file_uses(patch: ray_patches.Patch) -> None:
    patch.resolve()
    source = (ROOM / f"{patch.file}.py").read_text()
    assert patch.target.split(":")[1].split(".")[-1] in source or patch.file == "haproxy"


def test_the_installed_ray_is_one_in_which_the_patches_were_read() -> None:
    assert is_supported() and report_unsupported() is None


@pytest.mark.parametrize("version", ["2.61.0", "2.6.0", "3.60.1", "2.600.0"])
def test_another_version_of_ray_gets_one_line_that_names_the_patches(version: str) -> None:
    assert not is_supported(version)
    line = report_unsupported(version)
    assert line is not None and "\n" not in line and f"Ray {version}" in line
    assert all(patch.file in line for patch in PATCHES)


def test_on_another_version_of_ray_the_cluster_starts_as_ray_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_patches, "report_unsupported", lambda: "Ray 9.9.9 is not Ray 2.60")
    monkeypatch.setattr(ray, "init", lambda **given: options.append(given))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    lines: list[str] = []
    small_cluster.start("serve", lines.append)
    assert options == [{"address": "local", "namespace": "serve"}] and lines == ["Ray 9.9.9 is not Ray 2.60"]


def test_on_another_version_of_ray_nothing_of_ray_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import worker
    from ray.serve._private import replica

    before = (worker.print_to_stdstream, vars(replica)["add_port_to_grpc_server"])
    monkeypatch.setattr(ray_patches, "is_supported", lambda: False)
    monkeypatch.setattr(ray, "get_actor", lambda *_, **__: pytest.fail("the controller was asked for"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: loopback.ADDRESS)
    controller_interval.set_interval(0.5)
    loopback.keep_replica_on_loopback()
    shutdown.hide_controller_errors()
    assert (worker.print_to_stdstream, vars(replica)["add_port_to_grpc_server"]) == before


def test_errors_about_serves_controller_are_dropped_during_a_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import worker

    shown: list[Any] = []
    monkeypatch.setattr(worker, "print_to_stdstream", lambda data, **_: shown.append(data["lines"]))
    shutdown.hide_controller_errors()
    show: Any = worker.print_to_stdstream
    show({"lines": ["Task ServeController.graceful_shutdown failed. There are infinite retries remaining"]})
    show({"lines": ["Task ServeController.listen_for_change failed.", "a node is out of memory"]}, ignore_prefix=False)
    assert shown == [["a node is out of memory"]]


def test_the_docs_have_the_table_of_patches() -> None:
    text = (ROOM.parents[1] / "docs" / "cluster.md").read_text()
    for patch in PATCHES:
        row = f"| `{patch.file}` | `{patch.target}` | {patch.change} | {patch.reason} |"
        assert row in text


def test_ray_still_looks_up_the_replaced_names_when_it_calls_them() -> None:
    """A patch of a module's name has no effect on a copy that Ray has taken of it."""
    from ray._private import worker

    assert "ray._private.node.Node(" in inspect.getsource(worker.init)
    assert "print_to_stdstream(" in inspect.getsource(worker.listen_error_messages)
