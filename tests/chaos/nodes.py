"""Nodes of Ray on this machine, of which two have a front each and the others an engine each; and what can happen to them."""

import contextlib
import ctypes
import os
import random
import signal
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.schema import ServeDeploySchema

from benchmarks.harness.programs import free_port
from deployments.local import process_tag
from deployments.local.serve_run import cluster_variables
from tests.support.programs import REPOSITORY
from tests.support.waiting import wait_until

NUM_FRONTS: Final = 2
MODEL: Final = "llama-demo"
SETTLED_WITHIN_S: Final = 420.0  # a front that leaves keeps its place until its streams have ended
DRAIN_TIMEOUT_S: Final = 300.0  # of a front: longer than the slowest stream
# A node without its process is dead after 6 s instead of Ray's 30; a node that is only busy has a minute.
HEALTH_CHECKS: Final = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 6,
}
_PIDFD_GETFD: Final = 438  # the system call's number, the same on every architecture


class Nodes:
    """A cluster that serves the demo model. Its methods are to be called in the main thread, as Ray demands of `add_node`."""

    def __init__(self, directory: Path, num_engines: int, draw: random.Random, **engine_args: Any) -> None:
        self.num_engines, self.draw, self._directory = num_engines, draw, directory
        self._engine_args: dict[str, Any] = {"model_id": MODEL, "ckpt_dir": "demo"}
        self._engine_args |= {"max_queue": 1000, "spare_ranks": False} | engine_args
        self._tag, self._port = uuid.uuid4().hex, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._struck_s = 0.0
        process_tag.start_watcher(self._tag, str(directory))
        os.environ |= cluster_variables(directory) | {"RAY_TMPDIR": str(directory), "PYTHONPATH": str(REPOSITORY)}
        os.environ |= {process_tag.VARIABLE: self._tag, "SPT_NOENV": "1"}
        front: dict[str, Any] = {"num_cpus": 0, "resources": {"front": 1}}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={**front, "include_dashboard": False, "_system_config": HEALTH_CHECKS},
        )
        for _ in range(NUM_FRONTS - 1):
            self._cluster.add_node(**front)
        self._engine_nodes = [self._cluster.add_node(num_cpus=1) for _ in range(num_engines)]
        ray.init(address=self._cluster.address, namespace="serve", log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self._port})
        self.change(num_engines)

    def end(self) -> None:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()
        process_tag.end_tagged_processes(self._tag)

    def logs(self) -> str:
        """Of the replicas and of Serve's controller."""
        files = sorted(self._directory.glob("**/logs/serve/*.log"))
        return "\n".join(f"==== {file.name}\n{file.read_text(errors='replace')}" for file in files)

    def memory(self) -> dict[str, int]:
        """Resident MB of fronts and engines, also of those that leave."""
        found = {}
        for deployment in ("LlamaIngress", "LlamaEngine"):
            for pid in self._processes(f":{deployment}"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[f"{deployment} {pid}"] = psutil.Process(pid).memory_info().rss // 2**20
        return found

    def change(self, num_engines: int, num_fronts: int = NUM_FRONTS, **engine_args: Any) -> None:
        """Deploy, and wait until it has happened. engine_args: arguments that change, for new engines."""
        others: frozenset[str] = self.settle() if engine_args else frozenset()
        self._sizes, self._engine_args = (num_engines, num_fronts), self._engine_args | engine_args
        front = {"name": "LlamaIngress", "num_replicas": num_fronts}
        front |= {"ray_actor_options": {"num_cpus": 0, "resources": {"front": 1}}}
        engine = {"name": "LlamaEngine", "num_replicas": num_engines}
        http = {"host": "127.0.0.1", "port": self._port}
        # All nodes have one address, so HAProxy runs on the head only.
        config: dict[str, Any] = {"proxy_location": "HeadOnly", "http_options": http, "applications": []}
        for name, route, build, args, deployment in (
            ("llama", "/", "build_ingress", {"drain_timeout_s": DRAIN_TIMEOUT_S}, front),
            ("demo", None, "build_engine", self._engine_args, engine),
        ):
            place = {"name": name, "route_prefix": route, "import_path": f"deployments.app:{build}"}
            config["applications"].append(place | {"args": args, "deployments": [deployment]})
        self._strikes()
        _client().deploy_apps(ServeDeploySchema.model_validate(config))
        self.settle(other_than=others)

    def settle(self, other_than: frozenset[str] = frozenset()) -> frozenset[str]:
        """Wait until every front is connected with all engines, which are ready; none of them one of `other_than`. Returns the
        ids of the engines."""
        num_engines, num_fronts = self._sizes

        def found() -> frozenset[str] | None:
            for node in [node for node in self._engine_nodes if not node.remaining_processes_alive()]:
                self._replace(node)  # Ray has ended a node that answered too late on a busy machine
            fronts = _broadcast("LlamaIngress", "llama", "describe")
            ready = {frozenset(e["id"] for e in front["engines"] if e["phase"] == "ready") for front in fronts}
            engines = ready.pop() if len(fronts) == num_fronts and len(ready) == 1 else frozenset()
            return engines if len(engines) == num_engines and not engines & other_than else None

        return wait_until(f"all fronts have {num_engines} engines", found, SETTLED_WITHIN_S, 0.2)

    def strike(self, kind: str, *, settles: bool) -> float:
        """Have something happen. When it did, by time.time(). settles: wait until the cluster serves as before."""
        self._struck_s = 0.0
        getattr(self, kind)()
        if settles:
            time.sleep(0.5)  # the fronts notice that an engine has ended
            self.settle()
        return self._struck_s

    # What can happen.

    def engine(self) -> None:
        """An engine's process is killed."""
        self._kill(self._replica("demo", "LlamaEngine"))

    def front(self) -> None:
        """A front's process is killed."""
        self._kill(self._replica("llama", "LlamaIngress"))

    def node(self) -> None:
        """An engine's node is killed, raylet first, and then started again."""
        node = self.draw.choice(self._engine_nodes)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        self._kill(*(process.pid for process in [raylet, *raylet.children(recursive=True)]))
        self._replace(node)

    def rank(self) -> None:
        self._kill(self._one("a rank runs", lambda: self._processes("ray::RankWorker")))

    def cut(self) -> None:
        """The connections of one engine with some fronts are cut."""
        engine = self._one("an engine answers", lambda: _broadcast("LlamaEngine", "demo", "invitation"))
        pids = _replicas("llama", "LlamaIngress")
        fronts = self.draw.sample(pids, self.draw.randint(min(1, len(pids)), len(pids)))
        self._strikes()
        for pid in fronts:
            cut_connections(pid, engine.port)

    def stop(self) -> None:
        """An engine's process stands still for 4 s."""
        self._pause(self._replica("demo", "LlamaEngine"), self.draw.choice((4.0, 4.0, 18.0)))

    def slow(self) -> None:
        """An engine's process stands still again and again."""
        pid = self._replica("demo", "LlamaEngine")
        for _ in range(8):
            self._pause(pid, 0.3)
            time.sleep(0.2)

    def controller(self) -> None:
        """Serve's controller is killed."""
        self._kill(*self._processes("ray::ServeController"))

    def down(self) -> None:
        """One engine less, then again all."""
        self.change(self.num_engines - 1)
        self.change(self.num_engines)

    def front_down(self) -> None:
        """One front less while engines are upgraded, so that the one that drains needs the new engines; then again all."""
        self.change(self.num_engines, NUM_FRONTS - 1, max_queue=self._engine_args["max_queue"] + 1)
        self.change(self.num_engines)

    def upgrade(self) -> None:
        """Engines with another argument, without room: each ends before its successor starts."""
        self.change(self.num_engines, max_queue=self._engine_args["max_queue"] + 1)

    def upgrade_with_room(self) -> None:
        """One engine less, whose room the successor of another one has."""
        self.change(self.num_engines - 1)
        self.change(self.num_engines - 1, max_queue=self._engine_args["max_queue"] + 1)
        self.change(self.num_engines)

    def other_numerics(self) -> None:
        """An upgrade to engines that compute other bits: answers may differ."""
        count = 3 - self._engine_args["model_parallel_size"]
        self.change(self.num_engines, model_parallel_size=count, cpus_per_rank=1 / count)

    def _replace(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)
        self._engine_nodes.remove(node)
        self._engine_nodes.append(self._cluster.add_node(num_cpus=1))

    def _strikes(self) -> None:
        self._struck_s = self._struck_s or time.time()

    def _kill(self, *pids: int) -> None:
        self._strikes()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _pause(self, pid: int, seconds: float) -> None:
        self._strikes()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def _processes(self, name: str) -> list[int]:
        return [pid for pid in process_tag.tagged_processes(self._tag) if name in _command(pid)]

    def _replica(self, application: str, deployment: str) -> int:
        return int(self._one("a replica runs", lambda: _replicas(application, deployment)))

    def _one(self, what: str, found: Callable[[], list[Any]]) -> Any:
        """One of those found. After another fault there may be none for a while."""
        return self.draw.choice(wait_until(what, found, SETTLED_WITHIN_S))


def cut_connections(pid: int, port: int) -> None:
    """Shut down, from outside, the connections of a process to a port."""
    for connection in psutil.Process(pid).net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            handle = os.pidfd_open(pid)
            descriptor = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, handle, connection.fd, 0)
            os.close(handle)
            assert descriptor >= 0, os.strerror(ctypes.get_errno())
            with socket.socket(fileno=descriptor) as own, contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _broadcast(deployment: str, application: str, method: str) -> list[Any]:
    """The answers of all replicas; none where one has just died."""
    with contextlib.suppress(Exception):
        return list(serve.get_deployment_handle(deployment, application).broadcast(method).results(timeout_s=30.0))
    return []


def _replicas(application: str, deployment: str) -> list[int]:
    """The processes of the replicas that run."""
    found = _client().get_serve_details()["applications"][application]["deployments"][deployment]["replicas"]
    return [replica["pid"] for replica in found if replica["state"] == "RUNNING"]


def _client() -> Any:
    return serve.context._get_global_client()
