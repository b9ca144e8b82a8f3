"""What ends the server of `llama-ray up`, in which order, and its watcher; `tests/servers/` ends real servers."""

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.wire.process_end import ProcessIdentity, end_process, is_running
from deployments.local import shutdown as module
from deployments.local.shutdown import Shutdown
from tests.support.programs import REPOSITORY, environment
from tests.support.waiting import wait_until


class Watcher:
    """A deployment watcher that only stores."""

    def __init__(self, *, owns_cluster: bool, failure: str | None = None) -> None:
        self.owns_cluster, self.failure, self.stopping = owns_cluster, failure, threading.Event()


class Lines:
    """A console that stores its lines."""

    log = None

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, text: str) -> None:
        self.events.append(text)

    def end_of_log(self) -> str:
        return "ValidationError: port"


class Ended(BaseException):
    """In place of the end of the process."""


class Steps(Shutdown):
    """A shutdown whose steps are only noted. The drain lasts until another signal where `drains` is False."""

    def __init__(self, watcher: Watcher, *, has_ray: bool = True, ray_ends: bool = False, drains: bool = True) -> None:
        self.lines = Lines()
        stored: tuple[Any, Any] = (watcher, self.lines)
        super().__init__(stored[0], stored[1], "tag", Path("/nowhere"), lambda: None)
        self._has_ray, self._ray_ends, self._drains = has_ray, ray_ends, drains
        self.steps: list[str] = []

    def _has_ray_ended(self) -> bool:
        return self._ray_ends

    def _drain(self) -> None:
        self.steps.append("drain")
        if not self._drains:
            threading.Event().wait()

    def _end_serve(self) -> None:
        self.steps.append("end Serve")

    def end(self) -> Any:
        self.steps.append("end")
        raise Ended

    def steps_after(self, num_signals: int) -> list[str]:
        self._wakeup.send(bytes(num_signals))
        with pytest.raises(Ended):
            self._obey()
        return self.steps


@pytest.mark.parametrize("owns_cluster", [True, False])
def test_the_first_signal_drains_and_has_serve_end_before_all_processes(owns_cluster: bool) -> None:
    shutdown = Steps(watcher := Watcher(owns_cluster=owns_cluster))
    assert shutdown.steps_after(1) == ["drain", "end Serve", "end"]
    assert shutdown.is_requested and watcher.stopping.is_set()


@pytest.mark.parametrize(
    ("owns_cluster", "steps"), [(True, ["drain", "end"]), (False, ["drain", "end Serve", "end"])], ids=["own", "other"]
)
def test_the_second_signal_ends_all_at_once_but_on_another_cluster_serve_first(
    owns_cluster: bool, steps: list[str]
) -> None:
    shutdown = Steps(Watcher(owns_cluster=owns_cluster), drains=False)
    assert shutdown.steps_after(2) == steps and shutdown.is_requested


@pytest.mark.parametrize(("owns_cluster", "steps"), [(True, ["end"]), (False, ["end Serve", "end"])])
def test_after_a_failure_nothing_is_drained(owns_cluster: bool, steps: list[str]) -> None:
    shutdown = Steps(Watcher(owns_cluster=owns_cluster, failure="a shard is missing"))
    assert shutdown.steps_after(1) == steps and not shutdown.is_requested


def test_a_signal_before_ray_has_started_ends_at_once() -> None:
    assert Steps(Watcher(owns_cluster=True), has_ray=False).steps_after(1) == ["end"]


def test_the_end_of_ray_is_named_and_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_WHILE_SERVING_S", 0.01)
    shutdown = Steps(watcher := Watcher(owns_cluster=True), ray_ends=True)
    assert shutdown.steps_after(0) == ["end"]
    assert watcher.failure is not None and "Ray has ended" in shutdown.lines.events[0]


def test_a_drain_does_not_wait_for_a_ray_that_has_ended_too() -> None:
    shutdown = Steps(Watcher(owns_cluster=True), ray_ends=True, drains=False)
    assert shutdown.steps_after(1) == ["drain", "end"] and shutdown.is_requested


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
    shutdown = Steps(Watcher(owns_cluster=True, failure=failure))
    shutdown.is_requested = is_requested
    assert shutdown._exit_status() == status
    events = shutdown.lines.events
    assert [said] == [text.splitlines()[-1] for text in events] if said else events == []


BLOCKED = """
import ctypes, threading
from pathlib import Path
from types import SimpleNamespace
from deployments.local.shutdown import Shutdown

watcher = SimpleNamespace(owns_cluster=True, failure=None, stopping=threading.Event())
console = SimpleNamespace(event=print, log=None)
shutdown = Shutdown(watcher, console, "no such tag", Path("/nowhere"), lambda: None)
shutdown.start()
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
print("blocks", flush=True)
lock(mutex), lock(mutex)  # for ever, and no signal interrupts it
"""


def test_signals_at_once_end_the_command_while_its_main_thread_is_in_a_call_to_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED], cwd=REPOSITORY, env=environment(), stdout=subprocess.PIPE, text=True
    ) as command:
        try:
            assert command.stdout is not None and command.stdout.readline() == "blocks\n"
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(command.pid, number)
            assert command.wait(60) == 0
            assert command.stdout.read() == "Stopped\n"
        finally:
            command.kill()


# The watcher of `llama-ray up`: it ends what the command has started, however the command ends.


COMMAND = """
import os, subprocess, sys
from deployments.local import process_tag

stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"

def started():
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    return process.pid

tag, directory = sys.argv[1:]
others = started()
process_tag.start_watcher(tag, directory)
os.environ[process_tag.VARIABLE] = tag
print(others, started(), flush=True)
sys.stdin.read()
"""


def with_word(word: str) -> list[int]:
    """The ids of the processes that have this word in their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has just ended
            continue
    return found


@pytest.mark.parametrize(
    ("send", "number"),
    [(os.kill, signal.SIGKILL), (os.killpg, signal.SIGINT), (os.killpg, signal.SIGTERM)],
    ids=["killed", "Ctrl-C", "SIGTERM to the process group"],
)
def test_nothing_that_a_command_started_outlives_it(
    tmp_path: Path, send: Callable[[int, int], None], number: int
) -> None:
    """Processes that another command started, as on a cluster that is joined, do."""
    tag, directory = uuid.uuid4().hex, tmp_path / "files"
    directory.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, tag, str(directory)],
        cwd=REPOSITORY,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as command:
        assert command.stdout is not None
        others, own = (ProcessIdentity.of(int(pid)) for pid in command.stdout.readline().split())
        try:
            assert is_running(own) and len(with_word(tag)) == 2, "the command and its watcher"
            send(command.pid, number)
            wait_until("the command's process has ended", lambda: not is_running(own))
            wait_until("the command's files are gone", lambda: not directory.exists())
            wait_until("the watcher has ended too", lambda: not with_word(tag))
            assert is_running(others)
        finally:
            end_process(others, 0, 10)
            end_process(own, 0, 10)
