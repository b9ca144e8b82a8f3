"""Nodes of Ray on this machine, of which two have a front each and the others an engine each; and what can happen to them."""

import contextlib
import ctypes
import os
import random
import signal
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
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
PIDFD_GETFD: Final = 438  # the system call's number, the same on every architecture
LOADED: Final = "loaded"  # an adapter
MODEL: Final = "llama-demo"
SECOND: Final = "llama-second"
ADMIN_KEY: Final = "chaos-admin"
APPLICATIONS: Final = {"demo": MODEL, "second": SECOND}  # with an engine each
# Of the second model. Versions differ in a comment, so that answers are the same.
TEMPLATE: Final = "{{% for message in messages %}}{{{{ message['content'] }}}}{{% endfor %}}{{# version {version} #}}"
FEWEST: Final = {"demo": 1, "second": 0}  # engines, where Serve chooses their number
SCALING: Final[dict[str, Any]] = {
    "metrics_interval_s": 1.0,
    "look_back_period_s": 4.0,
    "upscale_delay_s": 0.0,
    "downscale_delay_s": 2.0,
    "policy": {"policy_function": "deployments.fleet.scaling:ExpectedTime", "policy_kwargs": {"ttft_s": 1.0}},
}
SETTLED_WITHIN_S: Final = 420.0  # a front that leaves keeps its place until its streams have ended
DRAIN_TIMEOUT_S: Final = 300.0  # of a front: longer than the slowest stream
# A node without its process is dead after 6 s instead of Ray's 30; a node that is only busy has a minute.
HEALTH_CHECKS: Final = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 6,
}


class Nodes:
    """A cluster that serves the demo model under two names. Its methods are to be called in the main thread, as Ray demands of
    `add_node`."""

    def __init__(
        self,
        directory: Path,
        num_engines: int,
        draw: random.Random,
        of_first: dict[str, Any],
        scales: bool = False,
        **engine_args: Any,
    ) -> None:
        """num_engines: of each model. of_first: arguments of the first one's engines. The second one has one rank. scales:
        Serve chooses the number of engines, at most `num_engines`; the second model sleeps while nobody asks for it."""
        self.num_engines, self.draw, self._directory, self._scales = num_engines, draw, directory, scales
        self.unasked: set[str] = set()  # models that clients are to leave alone
        common = {"ckpt_dir": "demo", "max_queue": 1000, "spare_ranks": False} | engine_args
        second = {"model_parallel_size": 1, "cpus_per_rank": 1, "chat_template": TEMPLATE.format(version=0)}
        self._args: dict[str, dict[str, Any]] = {
            "demo": {"model_id": MODEL} | common | of_first,
            "second": {"model_id": SECOND} | common | second,
        }
        self._version = 0  # of the template, and of the adapter that is loaded
        self._tag, self._port = uuid.uuid4().hex, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._struck_s = 0.0
        process_tag.start_watcher(self._tag, str(directory))
        os.environ |= cluster_variables(directory) | {"RAY_TMPDIR": str(directory), "PYTHONPATH": str(REPOSITORY)}
        os.environ |= {process_tag.VARIABLE: self._tag, "SPT_NOENV": "1", "LLAMA_ADMIN_KEYS": ADMIN_KEY}
        front: dict[str, Any] = {"num_cpus": 0, "resources": {"front": 1}}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={**front, "include_dashboard": False, "_system_config": HEALTH_CHECKS},
        )
        for _ in range(NUM_FRONTS - 1):
            self._cluster.add_node(**front)
        self._engine_nodes = [self._cluster.add_node(num_cpus=1) for _ in range(num_engines * len(APPLICATIONS))]
        ray.init(address=self._cluster.address, namespace="serve", log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": self._port})
        self._sizes, self._num_fronts = dict.fromkeys(APPLICATIONS, num_engines), NUM_FRONTS
        self.change()

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

    def change(
        self, application: str = "", num_engines: int = 0, num_fronts: int = NUM_FRONTS, **engine_args: Any
    ) -> None:
        """Deploy, and wait until it has happened. engine_args: arguments that change, for new engines of the application."""
        model = APPLICATIONS.get(application)
        others = frozenset(each for each in self.settle() if each[0] == model) if engine_args else frozenset()
        self._num_fronts = num_fronts
        if application:
            self._sizes[application] = num_engines
            self._args[application] |= engine_args
        front = {"name": "LlamaIngress", "num_replicas": num_fronts}
        front |= {"ray_actor_options": {"num_cpus": 0, "resources": {"front": 1}}}
        http = {"host": "127.0.0.1", "port": self._port}
        # All nodes have one address, so HAProxy runs on the head only.
        config: dict[str, Any] = {"proxy_location": "HeadOnly", "http_options": http, "applications": []}
        of_front = {"route_prefix": "/", "import_path": "deployments.app:build_ingress", "deployments": [front]}
        config["applications"].append({"name": "llama", "args": {"drain_timeout_s": DRAIN_TIMEOUT_S}} | of_front)
        for name, args in self._args.items():
            engine: dict[str, Any] = {"name": "LlamaEngine", "num_replicas": self._sizes[name]}
            if self._scales:
                scaling = SCALING | {"min_replicas": FEWEST[name], "max_replicas": self._sizes[name]}
                engine = {"name": "LlamaEngine", "autoscaling_config": scaling}
            place = {"name": name, "route_prefix": None, "import_path": "deployments.app:build_engine"}
            config["applications"].append(place | {"args": args, "deployments": [engine]})
        self._strikes()
        _client().deploy_apps(ServeDeploySchema.model_validate(config))
        self.settle(other_than=others)

    def settle(self, other_than: frozenset[tuple[str, str]] = frozenset()) -> frozenset[tuple[str, str]]:
        """Wait until every front is connected with all engines, which are ready; none of them one of `other_than`. Returns the
        engines' models and ids."""
        most = {APPLICATIONS[name]: size for name, size in self._sizes.items()}
        fewest = {APPLICATIONS[name]: size for name, size in FEWEST.items()} if self._scales else most

        def found() -> frozenset[tuple[str, str]] | None:
            for node in [node for node in self._engine_nodes if not node.remaining_processes_alive()]:
                self._replace(node)  # Ray has ended a node that answered too late on a busy machine
            fronts = _broadcast("LlamaIngress", "llama", "describe")
            ready = {
                frozenset((e["model"], e["id"]) for e in front["engines"] if e["phase"] == "ready") for front in fronts
            }
            engines = ready.pop() if len(fronts) == self._num_fronts and len(ready) == 1 else frozenset()
            sizes = Counter(model for model, _ in engines)
            is_all = all(fewest[model] <= sizes[model] <= most[model] for model in most)
            return engines if is_all and not engines & other_than else None

        return wait_until(f"all fronts have engines {fewest} .. {most}", found, SETTLED_WITHIN_S, 0.2)

    def strike(self, kind: str) -> float:
        """Have something happen, and wait until the cluster serves as before. When it happened, by time.time()."""
        self._struck_s = 0.0
        getattr(self, kind)()
        time.sleep(0.5)  # the fronts notice that an engine has ended
        self.settle()
        return self._struck_s

    # What can happen.

    def engine(self) -> None:
        """An engine's process is killed."""
        self._kill(self._engine())

    def front(self) -> None:
        """A front's process is killed."""
        self._kill(self._replica("llama", "LlamaIngress"))

    def node(self) -> None:
        """An engine's node is killed, raylet first, and then started again."""
        node = self.draw.choice(self._engine_nodes)
        self._kill(*_pids(node))
        self._replace(node)

    def rank(self) -> None:
        self._kill(self._one("a rank runs", lambda: self._processes("ray::RankWorker")))

    def cut(self) -> None:
        """The connections of one engine with some fronts are cut."""
        name = self._application()
        engine = self._one("an engine answers", lambda: _broadcast("LlamaEngine", name, "invitation"))
        pids = _replicas("llama", "LlamaIngress")
        fronts = self.draw.sample(pids, self.draw.randint(min(1, len(pids)), len(pids)))
        self._strikes()
        for pid in fronts:
            _cut_connections(pid, engine.port)

    def stop(self) -> None:
        """An engine's process stands still for 4 or 18 s."""
        pid = self._engine()
        self._strikes()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.draw.choice((4.0, 4.0, 18.0)))
        os.kill(pid, signal.SIGCONT)

    def controller(self) -> None:
        """Serve's controller is killed."""
        self._kill(*self._processes("ray::ServeController"))

    def down(self) -> None:
        """One engine less, then again all."""
        name = self._application()
        self.change(name, self.num_engines - 1)
        self.change(name, self.num_engines)

    def front_down(self) -> None:
        """One front less while engines are upgraded, so that the one that drains needs the new engines; then again all."""
        name = self._application()
        self.change(name, self.num_engines, NUM_FRONTS - 1, max_queue=self._args[name]["max_queue"] + 1)
        self.change(name, self.num_engines)

    def upgrade(self) -> None:
        """Engines with another argument, without room: each ends before its successor starts."""
        name = self._application()
        self.change(name, self.num_engines, max_queue=self._args[name]["max_queue"] + 1)

    def template(self) -> None:
        """The second model has another chat template."""
        self._version += 1
        self.change("second", self.num_engines, chat_template=TEMPLATE.format(version=self._version))

    def adapter(self) -> None:
        """Another adapter is loaded under a name that is in use."""
        self._version += 1
        self._strikes()
        self.load_adapter()

    def load_adapter(self) -> None:
        """One of two folders, whose adapters have the same product."""
        body = {"lora_name": LOADED, "lora_path": f"{LOADED}-{self._version % 2}", "load_inplace": True}
        for _ in range(10):  # 503 while engines answer late, or Serve does not list them yet
            response = httpx.post(
                f"{self.url}/v1/load_lora_adapter",
                json=body | {"base_model_name": MODEL},
                headers={"Authorization": f"Bearer {ADMIN_KEY}"},
                timeout=60.0,
                trust_env=False,
            )
            if response.status_code != 503:
                break
            time.sleep(1.0)
        assert response.status_code == 200, response.text

    def upgrade_with_room(self) -> None:
        """One engine less, whose room the successor of another one has."""
        name = self._application()
        self.change(name, self.num_engines - 1)
        self.change(name, self.num_engines - 1, max_queue=self._args[name]["max_queue"] + 1)
        self.change(name, self.num_engines)

    def lull(self) -> None:
        """Nobody asks for one model, but for its adapters, until Serve has removed all the engines that it may; then all
        clients ask again."""
        name = self._application()
        model, fewest = APPLICATIONS[name], FEWEST[name]

        def num_engines() -> set[int]:
            fronts = _broadcast("LlamaIngress", "llama", "describe")
            return {sum(engine["model"] == model for engine in front["engines"]) for front in fronts}

        self.unasked.add(model)
        wait_until(f"{model} has {fewest} engines", lambda: num_engines() == {fewest}, SETTLED_WITHIN_S, 0.5)
        self._strikes()
        self.unasked.clear()
        wait_until(f"{model} has an engine", lambda: min(num_engines(), default=0) > 0, SETTLED_WITHIN_S, 0.2)

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

    def _processes(self, name: str) -> list[int]:
        return [pid for pid in process_tag.tagged_processes(self._tag) if name in _command(pid)]

    def _application(self) -> str:
        return self.draw.choice(list(APPLICATIONS))

    def _engine(self) -> int:
        return self._replica(self._application(), "LlamaEngine")

    def _replica(self, application: str, deployment: str) -> int:
        return int(self._one("a replica runs", lambda: _replicas(application, deployment)))

    def _one(self, what: str, found: Callable[[], list[Any]]) -> Any:
        """One of those found. After another fault there may be none for a while."""
        return self.draw.choice(wait_until(what, found, SETTLED_WITHIN_S))


def _pids(node: Any) -> list[int]:
    """Of a node's raylet and of all that it has started."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [process.pid for process in [raylet, *raylet.children(recursive=True)]]


def _cut_connections(pid: int, port: int) -> None:
    """Shut down, from outside, the connections of a process to a port."""
    for connection in psutil.Process(pid).net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            handle = os.pidfd_open(pid)
            descriptor = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, handle, connection.fd, 0)
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
