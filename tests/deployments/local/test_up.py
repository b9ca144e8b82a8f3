"""How `llama-ray up` learns that the deployment has failed, and the printed cause."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.local import deployment_watcher
from deployments.local.deployment_watcher import ApplicationState, DeploymentWatcher, last_error


def test_the_cause_of_a_failure_is_the_last_error_of_a_traceback() -> None:
    text = "Traceback:\n  File x\nKeyError: 1\nDuring handling:\nllama_core.errors.CheckpointError: a shard\n  is missing\n"
    assert last_error(text) == "llama_core.errors.CheckpointError: a shard is missing"
    assert last_error("still deploying") == ""


def test_a_failed_deployment_ends_the_command_by_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    states = iter([("DEPLOYING", ""), ("DEPLOY_FAILED", "CheckpointError: a shard is missing")])
    monkeypatch.setattr(deployment_watcher, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(DeploymentWatcher, "_state", lambda _: ApplicationState(*next(states)))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    events: list[str] = []
    console: Any = SimpleNamespace(log=None, event=events.append, phase=lambda _: None)
    config: Any = SimpleNamespace(app_name="llama")
    watcher = DeploymentWatcher(config, console, owns_cluster=False)
    watcher.run()
    assert events == ["\nThe server cannot start: CheckpointError: a shard is missing"]
    assert watcher.failure == "CheckpointError: a shard is missing" and watcher.stopping.is_set()
    assert sent == [signal.SIGINT]
