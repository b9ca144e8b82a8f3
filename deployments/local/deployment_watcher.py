"""Follows one Serve application until it is ready or has failed, then while it serves, and tells the console.

`serve run` submits a configuration and then sleeps; it does not report whether the application runs.
"""

import contextlib
import json
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Final

from deployments.local.banner import banner, base_url
from deployments.local.config_file import ConfigFile
from deployments.local.console import Console

LOOK_EVERY_S: Final = 0.2
PENDING_NOTICE_S: Final = 10.0  # wait of a placement group after which the user is told what the cluster lacks
LOADING_NOTICE_S: Final = 10.0  # between two lines about ranks that load
LOOK_WHILE_SERVING_S: Final = 5.0
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not by the proxy that http_proxy names


@dataclass(frozen=True, slots=True)
class ApplicationState:
    """The application's state in Serve. `status` is None while Serve does not know the application."""

    status: str | None = None
    cause: str = ""
    is_built: bool = False
    deployed_s: float = 0.0  # the time at which it was deployed last


class DeploymentWatcher(threading.Thread):
    """Follows one application; `failure` is the cause if it cannot be ready."""

    def __init__(self, config: ConfigFile, console: Console, *, owns_cluster: bool) -> None:
        """owns_cluster: this command started the Ray cluster, and nothing else is deployed there."""
        super().__init__(daemon=True, name="deployment-watcher")
        self.app_name, self.owns_cluster = config.app_name, owns_cluster
        self._config = config
        self.failure: str | None = None
        self.is_ready = False
        self.stopping = threading.Event()
        self._console = console
        self._told_at_s = time.monotonic()

    def fail(self, failure: str) -> None:
        """Note why the server cannot start, unless a cause is known or the server is being ended."""
        if self.failure is None and not self.stopping.is_set():
            self.failure = failure

    def run(self) -> None:
        begin_s, has_noticed = time.monotonic(), False
        while self.failure is None and not self.stopping.wait(LOOK_EVERY_S):
            state = self._state()
            if state.is_built:
                self._console.phase("application built")
            if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                self.failure = state.cause
            elif state.status == "RUNNING":
                if self._check_ready():
                    self.is_ready = True
                    self._tell_changes(state.deployed_s)
                    return
            elif not has_noticed and time.monotonic() - begin_s > PENDING_NOTICE_S and (reason := _pending()):
                has_noticed = True
                self._console.event(f"Waiting for room: one replica {reason}")
        if self.failure is not None:
            self._console.event(f"\nThe server cannot start: {self.failure}")
            if self._console.log is not None:
                self._console.event(f"All output is in {self._console.log}")
            self.stopping.set()
            os.kill(os.getpid(), signal.SIGINT)  # the command then ends everything that it has started

    def _tell_changes(self, deployed_s: float) -> None:
        """Until the server ends, tell when another program deploys the application anew."""
        while not self.stopping.wait(LOOK_WHILE_SERVING_S):
            if (now_s := self._state().deployed_s) > deployed_s:
                self._console.event(f"Another program has deployed the application {self.app_name} anew")
                deployed_s = now_s

    def _check_ready(self) -> bool:
        """Whether the server is ready; the banner has then been printed. Notes a failure."""
        try:
            readiness, props = self._get("/ready"), self._get("/props")
        except (OSError, ValueError):  # no server answers yet
            return False
        phase, detail = readiness.get("phase"), str(readiness.get("detail", ""))
        if phase == "failed":
            self.failure = detail
        if phase != "ready":
            if phase in ("fetching", "loading"):
                self._report_loading(detail)
            return False
        if "error" in props:  # HTTP needs an API key; a handle needs none, but eleven threads
            from ray import serve

            try:
                props = serve.get_app_handle(self.app_name).describe.remote().result(timeout_s=5)
            except Exception:  # Serve is ending, or the replica has just gone
                return False
        if props.get("phase") != "ready":  # another replica answered
            return False
        config = self._config
        self._console.phase("ready")
        self._console.show(banner(props, config.host, config.port, config.route_prefix, log=self._console.log))
        return True

    def _report_loading(self, detail: str) -> None:
        if detail and time.monotonic() - self._told_at_s > LOADING_NOTICE_S:
            self._told_at_s = time.monotonic()
            self._console.phase(detail)

    def _state(self) -> ApplicationState:
        import ray
        from ray import serve

        if not ray.is_initialized():
            return ApplicationState()
        try:
            application = serve.status().applications.get(self.app_name)
        except Exception:  # Serve is starting, or its controller is gone for a moment
            return ApplicationState()
        if application is None:
            return ApplicationState()
        texts = [application.message, *(deployment.message for deployment in application.deployments.values())]
        cause = next((found for text in texts if (found := last_error(text))), texts[0])
        deployed_s = application.last_deployed_time_s
        return ApplicationState(application.status.value, cause, bool(application.deployments), deployed_s)

    def _get(self, path: str) -> dict[str, Any]:
        config = self._config
        try:
            with _DIRECT.open(base_url(config.host, config.port) + config.route_prefix + path, timeout=2) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        answer = json.loads(body)
        if not isinstance(answer, dict):
            raise ValueError(path)
        return answer


def last_error(text: str) -> str:
    """The error at the end of a traceback, with the lines that explain it; empty if there is none."""
    lines = [line.strip() for line in text.splitlines()]
    last = next(
        (i for i in reversed(range(len(lines))) if re.match(r"[\w.]*(Error|Exception|Failure)\b", lines[i])), None
    )
    return " ".join(lines[last:])[:1000].strip() if last is not None else ""


def _pending() -> str | None:
    """The resources that a pending placement group needs, and those of the cluster. None while no group is pending."""
    import ray
    from ray.util import placement_group_table

    from cluster.driver.placement import shortage

    with contextlib.suppress(Exception):  # Ray's control service is busy; the next check asks again
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        for group in placement_group_table().values():
            if group["state"] == "PENDING":
                bundles = list(group["bundles"].values())
                return (
                    shortage(bundles, nodes, group["strategy"]) or "waits for resources of the cluster that are in use"
                )
    return None
