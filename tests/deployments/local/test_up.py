"""How `llama-ray up` learns that the deployment has failed, and the printed cause."""

import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.local import deployment_watcher
from deployments.local.deployment_watcher import ApplicationState, DeploymentWatcher, last_error


def test_the_cause_of_a_failure_is_the_last_error_of_a_traceback() -> None:
    text = "Traceback:\n  File x\nKeyError: 1\nDuring handling:\nllama_core.errors.CheckpointError: a shard\n  is missing\n"
    assert last_error(text) == "llama_core.errors.CheckpointError: a shard is missing"
    assert last_error("still deploying") == ""


def watcher(events: list[str], port: int = 0) -> DeploymentWatcher:
    console: Any = SimpleNamespace(log=None, event=events.append, phase=lambda _: None, show=events.append)
    config: Any = SimpleNamespace(app_name="llama", host="127.0.0.1", port=port, route_prefix="")
    return DeploymentWatcher(config, console, owns_cluster=True)


def test_a_failed_deployment_ends_the_command_by_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    states = iter([("DEPLOYING", ""), ("DEPLOY_FAILED", "CheckpointError: a shard is missing")])
    monkeypatch.setattr(deployment_watcher, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(DeploymentWatcher, "_state", lambda _: ApplicationState(*next(states)))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    events: list[str] = []
    one = watcher(events)
    one.run()
    assert events == ["\nThe server cannot start: CheckpointError: a shard is missing"]
    assert one.failure == "CheckpointError: a shard is missing" and one.stopping.is_set()
    assert sent == [signal.SIGINT]


def test_a_running_server_tells_when_another_program_deploys_its_application_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    one = watcher(events)
    states = [100.0, 100.0, 0.0, 100.0, 200.0, 200.0, 0.0, 200.0]  # 0: Serve's controller does not answer

    def state(_: DeploymentWatcher) -> ApplicationState:
        deployed_s = states.pop(0)
        if not states:
            one.stopping.set()
        return ApplicationState("RUNNING", deployed_s=deployed_s)

    monkeypatch.setattr(deployment_watcher, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(deployment_watcher, "LOOK_WHILE_SERVING_S", 0.0)
    monkeypatch.setattr(DeploymentWatcher, "_state", state)
    monkeypatch.setattr(DeploymentWatcher, "_check_ready", lambda _: True)
    one.run()
    assert events == ["Another program has deployed the application llama anew"]


def test_the_banner_comes_although_the_environment_names_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"phase": "ready"}')

        def log_message(self, *_: object) -> None: ...

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(deployment_watcher, "banner", lambda props, *_, **__: f"banner of {props}")
    events: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert watcher(events, server.server_port)._check_ready()
        server.shutdown()
    assert events == ["banner of {'phase': 'ready'}"]
