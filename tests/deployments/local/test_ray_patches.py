"""The guard on Ray's version. The list of patches agrees with Ray and with the docs."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import ray

from deployments.local import ray_patches, small_cluster
from deployments.local.ray_patches import PATCHES, is_supported, report_unsupported
from llama_core.cgroups import usable_cpus

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


def test_on_another_version_of_ray_the_cluster_starts_as_ray_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(ray_patches, "report_unsupported", lambda: "Ray 9.9.9 is not Ray 2.60")
    monkeypatch.setattr(ray, "init", lambda **given: options.append(given))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    lines: list[str] = []
    small_cluster.start("serve", lines.append)
    assert options == [{"address": "local", "namespace": "serve", "num_cpus": usable_cpus()}] and lines == [
        "Ray 9.9.9 is not Ray 2.60"
    ]


def test_the_object_store_is_on_a_disk_where_shared_memory_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **given: options.append(given))
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"RAY_TMPDIR": str(tmp_path)})
    for is_writable in (True, False):
        monkeypatch.setattr(os, "access", lambda path, how, answer=is_writable: answer or path != "/dev/shm")
        small_cluster.start("serve", lambda line: None)
    assert ["_plasma_directory" in given for given in options] == [False, True]
    assert options[1]["_plasma_directory"] == str(tmp_path)
