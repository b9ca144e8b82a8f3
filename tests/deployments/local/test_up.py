"""The end of `llama-ray up`: exit status, signals, and the printed cause."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.local import deployment_watcher, up
from deployments.local.deployment_watcher import ApplicationState, DeploymentWatcher, last_error
from deployments.local.shutdown import Shutdown


class Lines:
    """A console that stores its lines."""

    log = None

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, text: str) -> None:
        self.events.append(text)

    def phase(self, text: str) -> None:
        pass

    def end_of_log(self) -> str:
        return "ValidationError: port"


@pytest.mark.parametrize(
    ("is_requested", "failure", "status", "said"),
    [
        (True, None, 0, "Stopped"),
        (False, None, 1, "ValidationError: port"),
        (False, "a shard is missing", 1, None),
        (True, "a shard is missing", 1, None),
    ],
)
def test_only_a_requested_shutdown_is_a_success(
    is_requested: bool, failure: str | None, status: int, said: str | None
) -> None:
    console: Any = Lines()
    watcher: Any = SimpleNamespace(failure=failure)
    shutdown: Any = SimpleNamespace(is_requested=is_requested)
    assert up._exit_status(watcher, shutdown, console) == status
    assert [said] == [text.splitlines()[-1] for text in console.events] if said else console.events == []


@pytest.mark.parametrize("failure", [None, "a shard is missing"])
def test_the_second_signal_or_one_after_a_failure_ends_at_once(
    failure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(Shutdown, "_drain_and_end", lambda _: begun.append("drain"))
    stopping = SimpleNamespace(set=lambda: begun.append("watcher stops"))
    watcher: Any = SimpleNamespace(failure=failure, stopping=stopping, owns_cluster=False)
    console: Any = Lines()
    shutdown = Shutdown(watcher, console, "tag", Path("/nowhere"), lambda: None)
    if failure is None:
        shutdown.on_signal(signal.SIGINT, None)
        shutdown.finish()
        assert shutdown.is_requested and sorted(begun) == ["drain", "watcher stops"]
    with pytest.raises(KeyboardInterrupt):
        shutdown.on_signal(signal.SIGINT, None)


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
    console: Any = Lines()
    config: Any = SimpleNamespace(app_name="llama")
    watcher = DeploymentWatcher(config, console, owns_cluster=False)
    watcher.run()
    assert console.events == ["\nThe server cannot start: CheckpointError: a shard is missing"]
    assert watcher.failure == "CheckpointError: a shard is missing" and watcher.stopping.is_set()
    assert sent == [signal.SIGINT]
    assert up._exit_status(watcher, SimpleNamespace(is_requested=True), console) == 1  # type: ignore[arg-type]
