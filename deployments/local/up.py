"""`serve run CONFIG`, watched: says when it is ready, why it is not, and ends with an error if it never will be.

    python -m deployments.local.up serve_config.yaml

`serve run` itself submits the configuration and sleeps, whatever becomes of it. Here the same command runs in the main
thread, and a second one follows the deployment. HAProxy in front of the replicas is on unless RAY_SERVE_ENABLE_HA_PROXY=0.

A cluster of its own is started sooner than `serve run` alone would: without what a single server does not need
(`own_cluster`), and with steps beside each other that are taken one after another there.
"""

import contextlib
import importlib
import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click
import yaml

from deployments.local import haproxy
from deployments.local.banner import banner, base_url

PENDING_NOTICE_S = 10.0
READERS_S = 60.0  # for what was generated to reach clients, before the server ends
MARK = "LLAMA_UP_MARK"
SAFE_HEADERS = "deployments.serve_headers.middlewares"


class Watch(threading.Thread):
    """Follows one application until it is ready or has failed; `failure` says why it ended."""

    def __init__(self, app_name: str, host: str, port: int, *, is_own: bool) -> None:
        """is_own: the cluster is this command's, and nobody else's Serve runs in it."""
        super().__init__(daemon=True, name="watch")
        self.app_name, self.host, self.port, self.is_own = app_name, host, port, is_own
        self.failure: str | None = None
        self.stopping = threading.Event()

    def fail(self, failure: str) -> None:
        """Note why there will be no server, unless that is known or it is being ended."""
        if self.failure is None and not self.stopping.is_set():
            self.failure = failure

    def run(self) -> None:
        begin, noticed = time.monotonic(), False
        while self.failure is None and not self.stopping.wait(0.2):
            status, message = self._status()
            if status in ("DEPLOY_FAILED", "UNHEALTHY"):
                self.failure = message
            elif status == "RUNNING":
                if self._is_ready():
                    if self.is_own:
                        from deployments.local import controller_interval as controller_pace

                        controller_pace.set_pace(controller_pace.CALM_S)
                    return
            elif not noticed and time.monotonic() - begin > PENDING_NOTICE_S and (reason := _pending()):
                noticed = True
                print(f"Waiting for room: one replica {reason}", file=sys.stderr, flush=True)
        if self.failure is not None:
            print(f"\nThe server cannot start: {self.failure}", file=sys.stderr, flush=True)
            self.stopping.set()
            os.kill(os.getpid(), signal.SIGINT)  # `serve run` shuts everything down on Ctrl-C

    def _is_ready(self) -> bool:
        """Whether the server is ready; then the banner has been printed. Notes a failure."""
        try:
            readiness, props = self._get("/ready"), self._get("/props")
        except (OSError, ValueError):  # nothing answers there yet
            return False
        if readiness.get("phase") == "failed":
            self.failure = str(readiness.get("detail", ""))
        if readiness.get("phase") != "ready":
            return False
        if "error" in props:  # it asks for an API key, a handle does not; but that brings eleven threads along
            from ray import serve

            try:
                props = serve.get_app_handle(self.app_name).describe.remote().result(timeout_s=5)
            except Exception:  # Serve is ending, or the replica has just gone
                return False
        if props.get("phase") != "ready":  # another replica's
            return False
        print(banner(props, self.host, self.port), flush=True)
        return True

    def _status(self) -> tuple[str | None, str]:
        """The application's status in Serve, None while there is none, and the cause if it is a bad one."""
        import ray
        from ray import serve

        if not ray.is_initialized():
            return None, ""
        try:
            application = serve.status().applications.get(self.app_name)
        except Exception:  # Serve is only coming up
            return None, ""
        if application is None:
            return None, ""
        texts = [application.message, *(deployment.message for deployment in application.deployments.values())]
        return application.status.value, next((cause for text in texts if (cause := _cause(text))), texts[0])

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(base_url(self.host, self.port) + path, timeout=2) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        answer = json.loads(body)
        if not isinstance(answer, dict):
            raise ValueError(path)
        return answer


def _cause(text: str) -> str:
    """The error at the end of a traceback, with the lines that explain it; empty if there is none."""
    lines = [line.strip() for line in text.splitlines()]
    last = next(
        (i for i in reversed(range(len(lines))) if re.match(r"[\w.]*(Error|Exception|Failure)\b", lines[i])), None
    )
    return " ".join(lines[last:])[:1000].strip() if last is not None else ""


def _pending() -> str | None:
    """What the placement groups that wait ask for, and what the cluster has."""
    import ray
    from ray.util import placement_group_table

    from cluster.driver.placement import shortage

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    for group in placement_group_table().values():
        if group["state"] == "PENDING":
            return shortage(list(group["bundles"].values()), nodes, group["strategy"]) or "all that it needs is in use"
    return None


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python -m deployments.local.up CONFIG.yaml")
    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    http = config.get("http_options", {})
    host, port = http.get("host", "0.0.0.0"), http.get("port", 8000)
    _refuse_port_in_use(host, port)
    mark = uuid.uuid4().hex
    directory = tempfile.TemporaryDirectory(prefix="llama-haproxy-", ignore_cleanup_errors=True)
    os.environ[MARK] = mark  # every process started from here inherits it
    # A cluster of its own, unless told otherwise: Ray would join one that runs here, and Ctrl-C end all that is served there.
    if is_own := os.environ.get("RAY_ADDRESS", "local") == "local":
        os.environ.pop("RAY_ADDRESS", None)  # `serve run` would look for another cluster there
    os.environ["LLAMA_BANNER"] = "0"  # printed here, without a log line's prefix
    os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
    # One event loop for HTTP and the engine. On a thread of its own, which is for code that may block, every token would
    # change threads on its way out.
    os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
    # Serve reads some of the clients' headers before we do, and answers in its own way where it does not like them.
    os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", SAFE_HEADERS)
    for name, value in haproxy.settings(Path(directory.name)).items():
        os.environ.setdefault(name, value)

    import ray

    from deployments.local import small_cluster as own_cluster

    watch = Watch(config["applications"][0]["name"], host, port, is_own=is_own)
    ending = Ending(watch, mark, Path(directory.name), directory.cleanup)
    # Serve's own imports take as long as Ray's processes take to come up.
    threading.Thread(target=importlib.import_module, args=("ray.serve.scripts",), daemon=True, name="import").start()
    try:
        # As `serve run` would. Before it, because connecting replaces the handler of SIGTERM by one that skips the shutdown.
        own_cluster.start("serve") if is_own else ray.init(namespace="serve")
        signal.signal(signal.SIGTERM, ending.on_signal)
        signal.signal(signal.SIGINT, ending.on_signal)  # a shell that starts us in the background has it ignored
        watch.start()
        if is_own:
            _start_serve_ahead(config, watch)
        from ray.serve.scripts import cli

        cli(["run", sys.argv[1]], standalone_mode=False)
    except (SystemExit, KeyboardInterrupt, click.Abort):  # the last is what click makes of a second Ctrl-C
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        watch.stopping.set()
        if watch.is_alive():
            watch.join(2)
        ending.finish()
        ray.shutdown()
        end_marked(mark)
        directory.cleanup()
    # `serve run` ends itself with status 0 on whatever went wrong: only being told to end is a success.
    sys.exit(0 if ending.was_told and watch.failure is None else 1)


def _start_serve_ahead(config: dict[str, Any], watch: Watch) -> None:
    """Return as soon as Serve's controller exists. `serve run` deploys to a Serve that it finds, but one that it starts
    itself it first waits for: until every proxy listens. Meanwhile a worker imports the application that it will build.
    """
    import ray
    from pydantic import ValidationError
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME
    from ray.serve.schema import ServeDeploySchema

    try:
        schema = ServeDeploySchema.model_validate(config)
    except ValidationError:  # `serve run` says what is wrong
        return
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it would say that it found a Serve, with other options
    importing = ray.remote(num_cpus=0, max_retries=0)(_import_quietly)
    for application in schema.applications:
        if not application.runtime_env:
            importing.remote(application.import_path)

    def start() -> None:
        try:
            serve.start(
                proxy_location=schema.proxy_location,
                http_options=schema.http_options.model_dump(),
                grpc_options=schema.grpc_options.model_dump(),
            )
        except RayActorError as error:
            # On a slow machine Serve now and then takes a new proxy for dead, and puts another in its place.
            if not _is_there(SERVE_CONTROLLER_NAME):
                watch.fail(f"Serve did not start: {error}")
        except Exception as error:
            watch.fail(f"Serve did not start: {error}")

    starting = threading.Thread(target=start, daemon=True, name="serve")
    starting.start()
    while starting.is_alive() and not _is_there(SERVE_CONTROLLER_NAME):
        time.sleep(0.01)


def _is_there(actor_name: str) -> bool:
    import ray

    try:
        ray.get_actor(actor_name, namespace="serve")
    except ValueError:  # there is no such actor, or no more
        return False
    return True


def _import_quietly(import_path: str) -> None:
    """In a worker, which Serve gives the task of building the application next. Whatever is wrong shows there."""
    with contextlib.suppress(Exception):
        importlib.import_module(import_path.partition(":")[0])


class Ending:
    """The first signal lets live requests end, and new ones are answered 503 meanwhile; the second ends everything at once."""

    def __init__(self, watch: Watch, mark: str, haproxy_directory: Path, clean_up: Callable[[], None]) -> None:
        self.was_told = False
        self._haproxy_directory = haproxy_directory
        self._mark = mark
        self._clean_up = clean_up
        self.over = threading.Event()
        self._watch = watch
        self._thread = threading.Thread(target=self._end, daemon=True, name="ending")

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.was_told or self._watch.failure is not None:
            raise KeyboardInterrupt
        self.was_told = True
        self._watch.stopping.set()
        self._thread.start()
        if self._watch.is_own:
            threading.Thread(target=self._end_with_ray, daemon=True, name="mourning").start()

    def finish(self) -> None:
        """Ray is about to be left: nothing may ask it anything from here on."""
        self.over.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _end_with_ray(self) -> None:
        """Whoever ends all processes at once (systemd does, unless told otherwise) has ended Ray's too: nothing can be drained
        then, and asking Ray for anything would take for ever.
        """
        while not self.over.wait(0.2):
            if not any(b"/raylet\0" in _command_of(pid) for pid in _marked(self._mark)):
                print("Ray has been ended too: nothing can be drained.", file=sys.stderr, flush=True)
                end_marked(self._mark, patience_s=1.0)
                self._clean_up()
                os._exit(0)

    def _end(self) -> None:
        from ray import serve

        from deployments.local import controller_interval as controller_pace

        app = self._watch.app_name
        if self._watch.is_own:
            controller_pace.set_pace(controller_pace.QUICK_S)
        with contextlib.suppress(Exception):  # whatever it is, the end must come
            if serve.status().applications[app].status == "RUNNING":
                print("Draining: live requests may end; once more to end at once.", file=sys.stderr, flush=True)
                serve.get_app_handle(app).broadcast("drain").results()
                self._wait_for_readers()
        os.kill(os.getpid(), signal.SIGINT)
        # Serve asks every replica to drain, also one that still waits for room, and waits for its answer in vain.
        while not self.over.wait(0.2):
            with contextlib.suppress(Exception):
                _withdraw(app)

    def _wait_for_readers(self) -> None:
        """Everything is generated, and some may be on its way still: Serve ends HAProxy before the replicas.

        Whoever reads nothing is cut off by the replica or by HAProxy; this is for those who read, however slowly.
        """
        deadline = time.monotonic() + READERS_S
        with contextlib.suppress(OSError, ValueError):  # no HAProxy is there, or it is another one
            while haproxy.num_open(self._haproxy_directory) and time.monotonic() < deadline:
                if self.over.wait(0.05):
                    return


def _refuse_port_in_use(host: str, port: int) -> None:
    """HAProxy and Serve's proxy both share a port that another server has, and each would get some of its requests."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that were closed do not count
        try:
            listener.bind((host, port))
        except OSError as error:
            sys.exit(
                f"{host}:{port} cannot be used: {error.strerror}. Is another server running? Set http_options.port."
            )


def _withdraw(app_name: str) -> None:
    """End this application's replicas that still wait for room; Serve removes their placement groups when they are gone."""
    import ray
    from ray.util import placement_group_table

    for group in placement_group_table().values():
        if group["state"] == "PENDING" and group["name"].startswith(f"SERVE_REPLICA::{app_name}#"):
            ray.kill(ray.get_actor(group["name"], namespace="serve"))


def end_marked(mark: str, patience_s: float = 5.0) -> list[int]:
    """End every process that was started from this one and outlived Ray: its HAProxy does, when Ray is cut short."""
    ended: list[int] = []
    deadline = time.monotonic() + patience_s
    while (left := _marked(mark)) and time.monotonic() < deadline + patience_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        ended += [pid for pid in left if pid not in ended]
        time.sleep(0.1)
    return ended


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""


def _marked(mark: str) -> list[int]:
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has just ended, or is somebody else's
            continue
    return found


if __name__ == "__main__":
    main()
