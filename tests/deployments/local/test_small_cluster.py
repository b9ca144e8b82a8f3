"""What `llama-ray up` asks of Ray when it starts a cluster, and the list of patches of Ray."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import ray
import ray._private.node

from deployments.local import ray_patches, small_cluster
from deployments.local.ray_patches import PATCHES, is_supported, report_unsupported
from deployments.local.small_cluster import OBJECT_STORE_BYTES, SETTINGS
from llama_core.host.cgroups import usable_cpus

PLAIN = {"address": "local", "namespace": "serve", "num_cpus": usable_cpus()}
SMALL = PLAIN | {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
OWN = "RAY_task_events_report_interval_ms"
SLOW = "The current node timed out during startup."


class Starts:
    """Replaces `ray.init`, which fails with these errors first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failures: str, **variables: str) -> None:
        self.options: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._failures = list(failures)
        monkeypatch.setattr(ray, "init", self._init)
        monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in SETTINGS} | variables)

    def _init(self, **options: Any) -> None:
        self.options.append(options)
        if self._failures:
            raise Exception(self._failures.pop(0))

    def start(self) -> list[dict[str, Any]]:
        small_cluster.start("serve", self.lines.append)
        return self.options


def test_a_small_cluster_has_settings_unless_the_user_has_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    node = ray._private.node.Node
    assert Starts(monkeypatch, **{OWN: "500"}).start() == [SMALL]
    assert {name: os.environ[name] for name in SETTINGS} == SETTINGS | {OWN: "500"}
    assert ray._private.node.Node is node, "Ray's own class is restored"


def test_with_llama_dashboard_or_on_another_version_ray_starts_as_it_does_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Starts(monkeypatch, LLAMA_DASHBOARD="1").start() == [PLAIN] and not SETTINGS.keys() & os.environ.keys()
    monkeypatch.setattr(ray_patches, "report_unsupported", lambda: "Ray 9.9.9 is not Ray 2.60")
    other = Starts(monkeypatch)
    assert other.start() == [PLAIN] and other.lines == ["Ray 9.9.9 is not Ray 2.60"]


def test_the_object_store_is_on_a_disk_where_shared_memory_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts = Starts(monkeypatch, RAY_TMPDIR=str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, how: path != "/dev/shm")
    assert starts.start() == [SMALL | {"_plasma_directory": str(tmp_path)}]


@pytest.mark.parametrize(
    ("failures", "num_tries"), [([SLOW], 2), ([SLOW, SLOW], 2), (["no room on the disk"], 1)], ids=str
)
def test_ray_is_started_once_more_where_it_has_timed_out(
    monkeypatch: pytest.MonkeyPatch, failures: list[str], num_tries: int
) -> None:
    starts = Starts(monkeypatch, *failures)
    if len(failures) == num_tries:
        with pytest.raises(Exception, match=failures[-1]):
            starts.start()
    else:
        starts.start()
    assert starts.options == [SMALL] * num_tries
    assert any("once more" in line for line in starts.lines) == (num_tries > 1)


# The guard on Ray's version. The list of patches agrees with Ray and with the docs.


FOLDER = Path(small_cluster.__file__).parent


@pytest.mark.parametrize(("file", "target"), PATCHES)
def test_each_patch_names_an_object_of_ray_that_its_file_uses_and_the_docs_explain(file: str, target: str) -> None:
    module, _, name = target.partition(":")
    assert hasattr(importlib.import_module(module), name)
    assert name in (FOLDER / f"{file}.py").read_text() or file == "haproxy"
    assert f"| `{target}` |" in (FOLDER.parents[1] / "docs" / "cluster.md").read_text()


def test_the_installed_ray_is_one_in_which_the_patches_were_read() -> None:
    assert is_supported() and report_unsupported() is None


@pytest.mark.parametrize("version", ["2.61.0", "2.6.0", "3.60.1", "2.600.0"])
def test_another_version_of_ray_gets_one_line_that_names_the_patches(version: str) -> None:
    assert not is_supported(version)
    line = report_unsupported(version)
    assert line is not None and "\n" not in line and f"Ray {version}" in line
    assert all(target in line for _, target in PATCHES)
