"""The limits of a container, a pod or a service, from made-up cgroup folders of both versions."""

from pathlib import Path

import pytest

from llama_core.host import cgroups
from llama_core.host.cgroups import cpu_quota, usable_cpus
from llama_core.host.memory import available_host_bytes

CPU_FILES = {"v2": ("cpu.max",), "v1": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
MEMORY_FILES = {
    "v2": ("memory.max", "memory.current", "inactive_file", "active_file"),
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"),
}
OWN = {"v2": "0::/{}\n", "v1": "9:name=systemd:/\n4:memory:/{0}\n2:cpu,cpuacct:/{0}\n0::/\n"}


@pytest.fixture(params=["v2", "v1"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def own_path(tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The process's cgroup, two levels below the root, with no limit yet."""
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path / "mount")
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    (tmp_path / "own").write_text(OWN[version].format("machine/service"))
    return "machine/service"


def folder_of(controller: str, version: str, path: str) -> Path:
    folder = cgroups.MOUNT / (controller if version == "v1" else "") / path
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def set_quota(version: str, path: str, quota: str) -> None:
    folder, names = folder_of("cpu", version, path), CPU_FILES[version]
    for name, text in zip(names, [f"{quota} 100000"] if version == "v2" else [quota, "100000"], strict=True):
        (folder / name).write_text(text + "\n")


def set_memory(version: str, path: str, limit: str, used: int, file_cache: int = 0) -> None:
    folder, (limit_file, used_file, inactive, active) = folder_of("memory", version, path), MEMORY_FILES[version]
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / used_file).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{inactive} {file_cache}\n{active} 300\n")


def test_the_smallest_quota_of_the_process_and_its_parents_counts(version: str, own_path: str) -> None:
    assert cpu_quota() is None
    set_quota(version, "", "max" if version == "v2" else "-1")
    assert cpu_quota() is None
    set_quota(version, own_path, "350000")
    assert cpu_quota() == 3.5
    set_quota(version, "machine", "150000")
    assert cpu_quota() == 1.5
    set_quota(version, "another", "50000")
    assert cpu_quota() == 1.5


@pytest.mark.parametrize(("quota", "affinity", "cpus"), [(None, 8, 8), (3.9, 8, 3), (0.5, 8, 1), (6.0, 2, 2)])
def test_usable_cpus_are_whole_ones_of_affinity_and_quota(
    quota: float | None, affinity: int, cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: quota)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(affinity)))
    assert usable_cpus() == cpus


def test_the_memory_limit_of_a_parent_counts_and_its_file_cache_is_free(version: str, own_path: str) -> None:
    machine = available_host_bytes()
    assert machine > 10_000_000
    set_memory(version, own_path, "9000000", 1_000_000)
    assert available_host_bytes() == 8_000_300
    set_memory(version, "machine", "3000000", 2_500_000, file_cache=700_000)
    assert available_host_bytes() == 1_200_300
    set_memory(version, "", "max" if version == "v2" else "9223372036854771712", 3_000_000)
    assert available_host_bytes() == 1_200_300


def test_a_container_that_sees_the_hosts_path_has_its_limits_at_the_root(version: str, own_path: str) -> None:
    """Docker mounts the container's own cgroup there, and /proc/self/cgroup may have the path on the host."""
    set_memory(version, "", "5000000", 1_000_000)
    set_quota(version, "", "100000")
    assert available_host_bytes() == 4_000_300 and cpu_quota() == 1


def test_a_kernel_without_cgroups_sets_no_limit(version: str, own_path: str) -> None:
    cgroups.OWN.unlink()
    assert cpu_quota() is None and usable_cpus() >= 1 and available_host_bytes() > 10_000_000
